//! Images and the store: schedule, retention, and the verbs that list, check, repair and copy images.

mod encryption;
mod image_verbs;
mod keeping;
mod schedule;
mod store_verbs;
