//! Tests of the sockets, with real connections.

use super::diagnosis::{ID_BYTES, REPORT_BYTES};
use super::*;
use crate::job::Process;
use crate::job::obstacles::Finding;
use crate::network_socket::NetworkSocket;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, getsockname, socket,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

fn me() -> Process {
    let pid = i32::try_from(std::process::id()).unwrap();
    Process {
        host_pid: pid,
        pid,
        resident: 0,
    }
}

/// Returns the table of a job that has only these sockets.
fn table(sockets: &[&dyn AsRawFd]) -> TcpTable {
    let open = Descriptors::of(me().host_pid).unwrap();
    let mut table = TcpTable::read(&[open]).unwrap();
    let inodes = sockets.iter().map(|socket| {
        let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
        std::fs::metadata(path).unwrap().ino()
    });
    table.keep_owners(&inodes.collect::<Vec<_>>());
    table
}

#[test]
fn only_connections_with_both_ends_inside_are_recorded() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let client = TcpStream::connect(at).unwrap();
    let server = listener.accept().unwrap().0;
    let from = client.local_addr().unwrap();
    let sockets = table(&[&listener, &client, &server]).sockets();
    let mut connections = vec![(from, at), (at, from)];
    connections.sort_unstable();
    let expected = Sockets {
        listening: vec![at],
        connections,
        ..Sockets::default()
    };
    assert_eq!(sockets, expected);

    let half = table(&[&server]).sockets();
    let expected = Sockets {
        outside: vec![(at, from)],
        ..Sockets::default()
    };
    assert_eq!(half, expected);
    assert!(half.are_outside_only() && !sockets.are_outside_only());
}

#[test]
fn data_in_transit_and_closed_directions_are_unsettled() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut full = TcpStream::connect(at).unwrap();
    let reader = listener.accept().unwrap().0;
    let half = TcpStream::connect(at).unwrap();
    let other_half = listener.accept().unwrap().0;
    full.set_nonblocking(true).unwrap();
    while full.write(&[1; 16384]).is_ok() {}
    half.shutdown(Shutdown::Write).unwrap();
    let ends = |socket: &TcpStream| (socket.local_addr().unwrap(), socket.peer_addr().unwrap());
    let mut expected: Vec<_> = [&full, &reader, &half, &other_half].map(ends).to_vec();
    expected.sort_unstable();
    let sockets = table(&[&full, &reader, &half, &other_half]).sockets();
    assert_eq!(sockets.unsettled, expected);
    assert_eq!(sockets.connections, expected);
}

#[test]
fn a_connection_pending_in_a_listener_is_found() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let client = TcpStream::connect(at).unwrap();
    let inside = table(&[&listener, &client]);
    let error = inside.check_other_ends().unwrap_err();
    assert!(error.is_passing(), "{error}");
    assert!(matches!(error.finding, Finding::NotAccepted { remote, .. } if remote == at));
    let outside = table(&[&listener]);
    outside.check_other_ends().unwrap();
    let error = outside.check_backlog().unwrap_err();
    assert!(matches!(error.finding, Finding::Backlog(local) if local == at));
    let _server = listener.accept().unwrap();
    table(&[&listener]).check_backlog().unwrap();
}

#[test]
fn a_closed_end_matters_until_all_its_data_was_received() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut server = listener.accept().unwrap().0;
    server.set_nonblocking(true).unwrap();
    while server.write(&[1; 16384]).is_ok() {}
    drop(server);
    // The connection belongs to another program.
    table(&[&client]).check_other_ends().unwrap();
    let error = table(&[&client, &listener]).check_other_ends().unwrap_err();
    assert!(matches!(error.finding, Finding::NotRead { .. }), "{error}");
    client.read_to_end(&mut Vec::new()).unwrap();
    // The kernel acknowledges the end in its own time.
    while table(&[&client, &listener]).check_other_ends().is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn only_a_connection_to_other_programs_is_aborted() {
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
    assert_eq!(sockets.abort_outside(&NetworkSocket::open).unwrap(), 1);
    let error = aborted.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    server.write_all(b"x").unwrap();
    assert_eq!(kept.read(&mut [0; 1]).unwrap(), 1);
    assert_eq!(sockets.abort_outside(&NetworkSocket::open).unwrap(), 0);
}

#[test]
fn a_connection_pending_in_the_jobs_own_listener_is_inside() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: nftables needs root");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let flags = SockFlag::SOCK_NONBLOCK;
    let client = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
    bind(client.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    let own: SockaddrIn = getsockname(client.as_raw_fd()).unwrap();
    let from = SocketAddr::from(([127, 0, 0, 1], own.port()));
    let _lock = PacketLock::set(NetworkSocket::Netfilter.open().unwrap(), &[(from, at)]).unwrap();
    let to = SockaddrIn::new(127, 0, 0, 1, at.port());
    let waits = connect(client.as_raw_fd(), &to).unwrap_err();
    assert_eq!(waits, nix::errno::Errno::EINPROGRESS);
    let sockets = table(&[&listener, &client]).sockets();
    assert_eq!(sockets.connections, [(from, at)]);
    assert_eq!(sockets.unsettled, [(from, at)]);
    assert_eq!(table(&[&client]).sockets().outside, [(from, at)]);
}

#[test]
fn received_data_survives_the_reset_of_the_other_end() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: nftables needs root");
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let server = listener.accept().unwrap().0;
    let ends = (server.local_addr().unwrap(), server.peer_addr().unwrap());
    // The server is not notified yet.
    let _lock = PacketLock::set(NetworkSocket::Netfilter.open().unwrap(), &[ends]).unwrap();
    let reset = Sockets {
        outside: vec![(ends.1, ends.0)],
        ..Sockets::default()
    };
    assert_eq!(reset.abort_outside(&NetworkSocket::open).unwrap(), 1);
    let sockets = table(&[&client, &server]).sockets();
    assert_eq!(sockets.outside, [ends]);
    assert!(!sockets.are_outside_only());
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
    let sockets = table(&[&listener, &client, &server]).sockets();
    // The first end to close enters TIME_WAIT.
    drop(server);
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    drop((client, listener));
    let left = || {
        let closed = Diagnosis::new(NetworkSocket::Diagnosis.open().unwrap())
            .list(Which::Closed)
            .unwrap();
        closed.iter().filter(|one| one.local == at).count()
    };
    assert_eq!(left(), 1);
    assert!(sockets.destroy_leftovers(&NetworkSocket::open).unwrap() >= 1);
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
