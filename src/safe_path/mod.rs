//! Safe access to the job's files, whose paths the job's user may change at any time.
//!
//! ckpt-run accesses these files as root. Another user who can write to a folder on the path may replace that folder,
//! or the file, by a symbolic link, and redirect a privileged program to a file of root. Therefore every operation
//! - opens the folder without following a link that another user may have created ([`Spot`]),
//! - acts relative to the open folder, and follows no link there either,
//! - writes to no file that another user may have hard-linked there ([`Spot::is_lent`]), and creates and removes names
//!   for a user only if that user could do so, too ([`Spot::allows`]),
//! - is done with the rights of the job's user where that user can exchange folders ([`Spot::of_job`]).
//!
//! [`Way`] determines which users can change a path's target.

mod actor;
mod given;
mod seen_users;
mod spot;
mod way;

pub use actor::JobUsers;
pub(crate) use given::{give, is_just_made, is_of_kind, link_to};
pub(crate) use seen_users::SeenUsers;
pub(crate) use spot::{Spot, is_denied};
pub(crate) use way::Way;
