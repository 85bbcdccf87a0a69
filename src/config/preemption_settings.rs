//! Settings of `[preemption]`: the cloud whose notices are watched for, and the address of its metadata service.
//!
//! The meaning of each setting is documented in `config/default.toml`, as for all of [`super::model`].

use std::str::FromStr;

use serde::Deserialize;
use url::{Host, Url};

use super::Invalid;
use super::reading::optional_parsed;
use super::units::not;

/// `[preemption]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preemption {
    /// The cloud that is asked for notices.
    pub watch: NoticeSource,
    /// Address of the metadata service; `None` for the clouds' own.
    #[serde(deserialize_with = "optional_parsed")]
    pub endpoint: Option<Endpoint>,
}

/// The cloud that is asked for notices of preemption.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NoticeSource {
    /// No cloud.
    Off,
    /// The cloud whose metadata service answers.
    Auto,
    /// Amazon EC2.
    Aws,
    /// Google Compute Engine.
    Gcp,
    /// Azure virtual machines.
    Azure,
}

/// Address of a metadata service: `http://HOST` or `http://HOST:PORT`, without a slash at its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(String);

impl Endpoint {
    /// Returns the address.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Endpoint {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let refused = || not(text, "an address such as \"http://127.0.0.1:8080\"");
        let url = Url::parse(text).map_err(|_| refused())?;
        let is_plain = url.scheme() == "http"
            && url.host().is_some_and(|host| host != Host::Domain(""))
            && url.path() == "/"
            && url.query().is_none()
            && url.fragment().is_none()
            && url.username().is_empty()
            && url.password().is_none();
        if !is_plain {
            return Err(refused());
        }
        Ok(Self(url.as_str().trim_end_matches('/').to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_plain_address_of_a_server() {
        for (text, expected) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://[fd00:ec2::254]/", "http://[fd00:ec2::254]"),
            (
                "HTTP://Metadata.Google.Internal:80",
                "http://metadata.google.internal",
            ),
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().as_str(), expected);
        }
        for text in [
            "169.254.169.254",
            "127.0.0.1:80",
            "https://127.0.0.1",
            "http://",
            "http://x/latest",
            "http://x?a=b",
            "http://x#a",
            "http://me:secret@x",
        ] {
            let refusal = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(refusal.contains("is not an address such as"), "{refusal}");
        }
    }
}
