//! Attacks of other users on a run of root, and the trust in images and requests.

mod closed_supervisor;
mod job_users;
mod shared_places;
