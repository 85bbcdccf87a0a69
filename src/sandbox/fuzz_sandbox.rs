//! Fuzzing entry points of the sandbox's protocol.

use std::os::unix::net::UnixStream;

use super::protocol::{Event, Request, receive, send};

/// Receives requests until the end of the connection. Returns true if all were valid.
pub(crate) fn requests(socket: &UnixStream) -> bool {
    while let Ok(next) = receive::<Request>(socket) {
        let Some((request, descriptors)) = next else {
            return true;
        };
        drop(descriptors);
        let (left, right) = UnixStream::pair().unwrap();
        send(&left, &request, &[]).unwrap();
        let (again, none) = receive::<Request>(&right).unwrap().unwrap();
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
        assert!(none.is_empty());
    }
    false
}

/// Same as [`requests`], for events.
pub(crate) fn events(socket: &UnixStream) -> bool {
    while let Ok(next) = receive::<Event>(socket) {
        let Some((event, _descriptors)) = next else {
            return true;
        };
        let (left, right) = UnixStream::pair().unwrap();
        send(&left, &event, &[]).unwrap();
        assert_eq!(receive::<Event>(&right).unwrap().unwrap().0, event);
    }
    false
}
