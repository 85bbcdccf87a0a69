//! Notices of clouds that take their machine back: spot and preemptible machines.
//!
//! [`watch`] asks the metadata service of the cloud at short intervals (`clouds` knows what to ask and reads the answers,
//! `metadata_service` makes the requests) and sends the loop one event for the first notice.

pub(super) mod announcement;
mod clouds;
mod metadata_service;
mod notice_watch;
#[cfg(test)]
mod tests;

pub(super) use notice_watch::watch;
