//! Pseudo-terminal with a simulated user: types, reads the screen, resizes the window.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};

/// Terminal whose output is collected.
pub struct PseudoTerminal {
    master: File,
    /// Slave end for commands; kept open, so that the terminal outlives them.
    slave: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
    /// Initial modes of the terminal.
    before: Termios,
}

impl PseudoTerminal {
    /// Opens a terminal with close-on-exec, unlike `openpty`: commands that other tests start at the same time must not
    /// keep it open.
    pub fn new(rows: u16, columns: u16) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a pseudo-terminal");
        grantpt(&master).expect("granted");
        unlockpt(&master).expect("unlocked");
        let slave = ioctl_tiocgptpeer(&master, flags).expect("the other side");
        let master = File::from(master);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut source, seen) = (
            master.try_clone().expect("a descriptor"),
            Arc::clone(&shown),
        );
        thread::spawn(move || {
            let mut piece = [0; 4096];
            loop {
                match source.read(&mut piece) {
                    Ok(got) => seen.lock().unwrap().extend(&piece[..got]),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return,
                }
            }
        });
        let terminal = Self {
            before: tcgetattr(&slave).expect("a terminal"),
            master,
            slave,
            shown,
        };
        terminal.resize(rows, columns);
        terminal
    }

    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.master, size).expect("a terminal");
    }

    /// Returns another descriptor of the slave end as a command's stream.
    pub fn stream(&self) -> Stdio {
        self.slave.try_clone().expect("a descriptor").into()
    }

    pub fn types(&self, keys: &[u8]) {
        (&self.master).write_all(keys).expect("a terminal");
    }

    /// Returns all bytes written so far.
    pub fn bytes(&self) -> Vec<u8> {
        self.shown.lock().unwrap().clone()
    }

    pub fn modes(&self) -> Termios {
        tcgetattr(&self.slave).expect("a terminal")
    }

    /// Checks that the terminal has its initial modes again.
    #[track_caller]
    pub fn assert_modes_are_back(&self) {
        let (before, now) = (&self.before, self.modes());
        let shown = self.bytes();
        let shown = String::from_utf8_lossy(&shown);
        assert_eq!(now.local_modes, before.local_modes, "{shown}");
        assert_eq!(now.input_modes, before.input_modes, "{shown}");
        assert_eq!(now.output_modes, before.output_modes, "{shown}");
    }
}
