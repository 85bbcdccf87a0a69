//! Runs that a cloud's notice ends: the recorded answers of each cloud come from a server on loopback.

mod metadata_server;
mod notices;
mod watching;

use metadata_server::{MetadataServer, Service};
