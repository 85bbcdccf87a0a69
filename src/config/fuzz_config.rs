//! Settings for fuzzing.

use super::{ConfigError, Loaded, Sources};

thread_local! {
    /// The defaults, loaded once: loading them takes longer than everything else together.
    static DEFAULTS: Loaded = Loaded::defaults().unwrap();
}

/// Loads settings in the same way as [`load`](super::load).
pub(crate) fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
    let mut loaded = DEFAULTS.with(Clone::clone);
    loaded.lay_all(sources)?;
    Ok(loaded)
}
