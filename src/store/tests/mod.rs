//! Tests of the store as a whole.

#[cfg(test)]
pub(super) mod crash;
#[cfg(test)]
pub(super) mod damage;
#[cfg(test)]
pub(super) mod encryption;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_store;
#[cfg(test)]
pub(super) mod old_formats;
#[cfg(test)]
pub(super) mod properties;
#[cfg(test)]
pub(crate) mod support;
#[cfg(test)]
mod whole_store;
#[cfg(test)]
mod write_faults;
