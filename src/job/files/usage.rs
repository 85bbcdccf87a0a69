//! How one descriptor or mapping of the job touches a file.

use nix::fcntl::OFlag;
use procfs::process::MMPermissions;

use super::{Access, OpenFile};

/// What it can do to the file.
#[derive(Clone, Copy)]
pub(super) struct Usage {
    pub access: Access,
    /// It writes where it likes.
    pub rewrites: bool,
}

impl Usage {
    pub fn of_descriptor(flags: OFlag) -> Self {
        let access = match flags & OFlag::O_ACCMODE {
            OFlag::O_RDWR => Access::Update,
            OFlag::O_WRONLY => Access::Write,
            _ => Access::Read,
        };
        Self {
            access,
            rewrites: access > Access::Read && !flags.contains(OFlag::O_APPEND),
        }
    }

    /// Of a mapping: what is private never reaches the file.
    pub fn of_mapping(permissions: MMPermissions) -> Self {
        let rewrites = permissions.contains(MMPermissions::SHARED | MMPermissions::WRITE);
        let access = if rewrites {
            Access::Update
        } else {
            Access::Map
        };
        Self { access, rewrites }
    }

    /// Whether that is known of the file already.
    pub fn is_of(self, known: &OpenFile) -> bool {
        known.access >= self.access && known.rewrites >= self.rewrites
    }
}
