//! What other users can do to a run of root's, and what images and requests are trusted in.

mod closed_supervisor;
mod job_users;
mod shared_places;
