//! Tests of cancelling a release that timed out, after the agent has sent nothing, a part, or all of its reply.

use std::io::IoSlice;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};

use super::*;

/// Sends a reply with its segments, each with a descriptor.
fn answer(
    socket: &UnixDatagram,
    to: &UnixAddr,
    reply: &Reply,
    segments: &[u64],
) -> nix::Result<()> {
    let mut words = bytes(reply);
    for address in segments {
        words.extend(
            [
                address.to_ne_bytes(),
                (2 * MIB).to_ne_bytes(),
                [7; 8],
                [7; 8],
            ]
            .concat(),
        );
    }
    let held = descriptors(segments.len());
    let numbers: Vec<i32> = held.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights = if numbers.is_empty() { &[][..] } else { &rights };
    let pieces = [IoSlice::new(&words)];
    sendmsg(
        socket.as_raw_fd(),
        &pieces,
        rights,
        MsgFlags::empty(),
        Some(to),
    )
    .map(drop)
}

/// Returns the result of a release that times out before these replies arrive: `segments` of two in total, and the last
/// reply.
fn called_off(segments: &[u64], last: Option<Reply>) -> Result<Option<usize>, AgentError> {
    let token = Token::random().unwrap();
    let socket = pretender(&token);
    let mut channel = Channel::bind().unwrap();
    let mut agent = channel.agent(&token, 7);
    let late = agent.release(Duration::from_millis(5));
    assert!(matches!(late, Err(AgentError::TimedOut { .. })), "{late:?}");
    let (_, from) = socket.recv_from(&mut [0; 100]).unwrap();
    let to = UnixAddr::new_abstract(from.as_abstract_name().unwrap()).unwrap();
    if !segments.is_empty() {
        let batch = Reply {
            count: u32::try_from(segments.len()).unwrap(),
            total: 2,
            ..more(0)
        };
        answer(&socket, &to, &batch, segments).unwrap();
    }
    if let Some(last) = last {
        answer(&socket, &to, &last, &[]).unwrap();
    }
    let result = agent.call_off();
    assert_eq!(
        answer(&socket, &to, &more(1), &[8 * MIB]),
        Err(Errno::EPIPE)
    );
    result.map(|held| held.map(|held| held.len()))
}

#[test]
fn an_agent_that_has_not_sent_all_keeps_its_memory() {
    let failed = reply(wire::RELEASE, wire::DRIVER);
    for (segments, last) in [
        (&[][..], None),
        (&[0], None),
        (&[0], Some(failed)),
        (&[0, 2 * MIB], Some(failed)),
    ] {
        assert_eq!(called_off(segments, last).unwrap(), None, "{segments:?}");
    }
}

#[test]
fn late_release_loses_no_memory() {
    let last = Some(all(2, 4 * MIB));
    assert_eq!(called_off(&[0, 2 * MIB], last).unwrap(), Some(2));
}

#[test]
fn an_agent_that_has_sent_all_may_let_go_at_any_time() {
    let unknown = called_off(&[0, 2 * MIB], None);
    assert!(
        matches!(unknown, Err(AgentError::TimedOut { .. })),
        "{unknown:?}"
    );
    let lost = called_off(&[0], Some(reply(wire::RELEASE, wire::LOST)));
    assert!(matches!(lost, Err(AgentError::Lost { .. })), "{lost:?}");
}
