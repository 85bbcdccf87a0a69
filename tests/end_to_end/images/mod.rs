//! Images and the store: when images are taken, which are kept, the verbs that list, check, repair and copy them.

mod encryption;
mod image_verbs;
mod keeping;
mod schedule;
mod store_verbs;
