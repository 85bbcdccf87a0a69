//! Tests of the sockets, on real connections.

use super::diagnosis::{ID_BYTES, REPORT_BYTES};
use super::*;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

fn me() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

#[test]
fn only_connections_with_both_ends_inside_are_recorded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let client = TcpStream::connect(at).unwrap();
    let server = listener.accept().unwrap().0;
    let ends = [
        (client.local_addr().unwrap(), at),
        (at, client.local_addr().unwrap()),
    ];
    let sockets = Sockets::record(&[me()]).unwrap();
    assert!(sockets.listening.contains(&at));
    assert!(ends.iter().all(|end| sockets.connections.contains(end)));

    let inode = {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(format!("/proc/self/fd/{}", server.as_raw_fd()))
            .unwrap()
            .ino()
    };
    let table = table(me()).unwrap();
    let half = Sockets::of(table.iter().filter(|entry| entry.inode == inode));
    let outside = vec![(at, client.local_addr().unwrap())];
    assert_eq!(
        half,
        Sockets {
            outside,
            ..Sockets::default()
        }
    );
    assert!(half.are_outside_only() && !sockets.are_outside_only());
}

#[test]
fn a_connection_to_others_is_aborted_and_no_other_one() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: destroying sockets needs root");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let [mut aborted, mut kept] = [(); 2].map(|()| TcpStream::connect(at).unwrap());
    let [_other_end, mut server] = [(); 2].map(|()| listener.accept().unwrap().0);
    let sockets = Sockets {
        outside: vec![(aborted.local_addr().unwrap(), at)],
        ..Sockets::default()
    };
    assert_eq!(sockets.abort_outside().unwrap(), 1);
    let error = aborted.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    server.write_all(b"x").unwrap();
    assert_eq!(kept.read(&mut [0; 1]).unwrap(), 1);
    assert_eq!(sockets.abort_outside().unwrap(), 0);
}

#[test]
fn an_address_in_time_wait_is_free_again() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: destroying sockets needs root");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut client = TcpStream::connect(at).unwrap();
    let server = listener.accept().unwrap().0;
    let sockets = Sockets::record(&[me()]).unwrap();
    // The first end to close waits.
    drop(server);
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    drop((client, listener));
    let left = || {
        let closed = Diagnosis::open().unwrap().list(Which::Closed).unwrap();
        closed.iter().filter(|one| one.local == at).count()
    };
    assert_eq!(left(), 1);
    assert!(sockets.destroy_leftovers().unwrap() >= 1);
    assert_eq!(left(), 0);
}

#[test]
fn a_socket_with_an_owner_or_a_stranger_is_left_alone() {
    let [local, remote, other] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let sockets = Sockets {
        listening: vec![SocketAddr::from(([0, 0, 0, 0], 1))],
        connections: vec![(other, remote)],
        ..Sockets::default()
    };
    let closed = |local, remote, waits| Found {
        family: 2,
        id: [0; ID_BYTES],
        local,
        remote,
        waits,
        owned: false,
    };
    let far = SocketAddr::from(([192, 0, 2, 1], 2));
    assert!(sockets.claims(&closed(other, remote, false)));
    assert!(sockets.claims(&closed(local, remote, true)));
    assert!(!sockets.claims(&closed(local, remote, false)));
    assert!(!sockets.claims(&closed(local, far, true)));
    assert!(!sockets.claims(&closed(remote, local, true)));
    let mut report = [0; REPORT_BYTES];
    report[0] = 2;
    assert!(!Found::parse(&report).unwrap().owned);
    report[68] = 1;
    assert!(Found::parse(&report).unwrap().owned);
    assert!(Found::parse(&report[..REPORT_BYTES - 1]).is_none());
}
