//! Paths on the way to files of the job, which its user may change at any moment.
//!
//! ckpt-run acts on such files as root. Another user who can write to a folder on the way may put a link in the place of
//! that folder, or of the file, and lead a privileged program to a file of root's. Therefore every such operation
//! - opens the folder without following a link that another user can have made ([`Spot`]),
//! - acts relative to the folder that it holds open, and follows no link there either,
//! - writes to no file that another user can have linked there from elsewhere ([`Spot::is_lent`]), and makes and removes
//!   names for a user only where the user could do so, too ([`Spot::allows`]).
//!
//! [`Way`] says who can change what a path leads to.

mod spot;
mod way;

pub(crate) use spot::Spot;
pub(crate) use way::Way;
