//! Readings of the keys in `[metrics]`.

use std::net::SocketAddr;

use super::Invalid;
use super::units::shown;
use super::value::Value;

/// "" is none; a name is none either: it could be one address here and another there.
pub(super) fn address(value: &Value) -> Result<Option<SocketAddr>, Invalid> {
    match value.text()?.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| Invalid::Number {
            given: shown(text),
            expected: "an address with a port, such as \"127.0.0.1:9464\"",
        }),
    }
}
