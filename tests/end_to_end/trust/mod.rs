//! What other users can do to a run of root's, and what images and requests are trusted in.

mod shared_places;
