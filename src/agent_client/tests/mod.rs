//! Tests with invalid replies, which the agent never sends, and of the agent's table against a plain map.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proptest::prelude::*;

use super::datagram::{decode, encode};
use super::receipt::Receipt;
use super::wire::{self, Reply, Request};
use super::*;
use crate::agent::table;

mod call_off;

const LIMIT: Duration = Duration::from_secs(10);
const MIB: u64 = 1 << 20;

fn reply(kind: u32, status: u32) -> Reply {
    Reply {
        magic: wire::MAGIC,
        version: wire::VERSION,
        kind,
        status,
        code: 0,
        thread: 5,
        first: 0,
        count: 0,
        total: 0,
        flags: 0,
        bytes: 0,
        serial: 1,
    }
}

fn more(first: u32) -> Reply {
    Reply {
        first,
        ..reply(wire::RELEASE, wire::MORE)
    }
}

fn all(total: u32, bytes: u64) -> Reply {
    Reply {
        total,
        bytes,
        flags: wire::RELEASED,
        ..reply(wire::RELEASE, wire::OK)
    }
}

fn segment(address: u64, len: u64) -> wire::Segment {
    wire::Segment {
        address,
        len,
        device: [7; 16],
    }
}

fn descriptors(count: usize) -> Vec<OwnedFd> {
    (0..count)
        .map(|_| fs::File::open("/dev/null").unwrap().into())
        .collect()
}

/// Returns the result of a release that is answered by these replies.
fn receive(
    answers: &[(Reply, &[wire::Segment], usize)],
) -> Result<Option<Vec<Segment>>, &'static str> {
    let mut receipt = Receipt::default();
    for (reply, segments, count) in answers {
        receipt.absorb(reply, segments, descriptors(*count))?;
    }
    let held = receipt.take();
    Ok(held.map(|held| held.iter().map(|held| held.segment).collect()))
}

#[test]
fn a_release_is_complete_when_all_came() {
    let (first, second) = (segment(0, 2 * MIB), segment(8 * MIB, 4 * MIB));
    let whole = receive(&[
        (more(0), &[first], 1),
        (more(1), &[second], 1),
        (all(2, 6 * MIB), &[], 0),
    ]);
    assert_eq!(whole.unwrap().unwrap().len(), 2);
    // A failed attempt leaves nothing; the next one starts anew.
    let failed = reply(wire::RELEASE, wire::DRIVER);
    let again = receive(&[
        (more(0), &[first], 1),
        (failed, &[], 0),
        (more(0), &[second], 1),
        (all(1, 4 * MIB), &[], 0),
        (all(1, 4 * MIB), &[], 0),
    ]);
    assert_eq!(again.unwrap().unwrap()[0].address, 8 * MIB);
    assert_eq!(receive(&[(more(0), &[first], 1)]).unwrap(), None);
    assert_eq!(
        receive(&[(all(1, 4 * MIB), &[], 0)]).unwrap(),
        None,
        "released to others"
    );
    let nothing = reply(wire::RELEASE, wire::OK);
    assert_eq!(receive(&[(nothing, &[], 0)]).unwrap(), Some(Vec::new()));
}

#[test]
fn a_release_that_cannot_be_is_refused() {
    let good = segment(2 * MIB, 2 * MIB);
    let many = vec![good; wire::BATCH_MAX + 1];
    let unreleased = Reply {
        flags: 0,
        ..all(1, 2 * MIB)
    };
    for (what, answers) in [
        ("none", &[(more(0), &[][..], 0)][..]),
        ("too many", &[(more(0), &many, many.len())]),
        (
            "a descriptor less",
            &[(more(0), &[good, segment(8 * MIB, 2)], 1)],
        ),
        ("a descriptor more", &[(more(0), &[good], 2)]),
        ("no length", &[(more(0), &[segment(MIB, 0)], 1)]),
        ("past the end", &[(more(0), &[segment(u64::MAX, 2)], 1)]),
        ("overlap", &[(more(0), &[good, segment(3 * MIB, MIB)], 2)]),
        (
            "overlap with the batch before",
            &[(more(0), &[good], 1), (more(1), &[segment(3 * MIB, 1)], 1)],
        ),
        ("not the first", &[(more(1), &[good], 1)]),
        (
            "a gap",
            &[(more(0), &[good], 1), (more(2), &[segment(8 * MIB, 2)], 1)],
        ),
        (
            "one more than came",
            &[(more(0), &[good], 1), (all(2, 2 * MIB), &[], 0)],
        ),
        (
            "a byte more than came",
            &[(more(0), &[good], 1), (all(1, 2 * MIB + 1), &[], 0)],
        ),
        (
            "not released",
            &[(more(0), &[good], 1), (unreleased, &[], 0)],
        ),
        (
            "after the last",
            &[
                (more(0), &[good], 1),
                (all(1, 2 * MIB), &[], 0),
                (more(1), &[segment(8 * MIB, 2)], 1),
            ],
        ),
    ] {
        assert!(receive(answers).is_err(), "{what}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer_or_none(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), known in any::<bool>()) {
        if known && bytes.len() >= 8 {
            bytes[..4].copy_from_slice(&wire::MAGIC.to_ne_bytes());
            bytes[4..8].copy_from_slice(&wire::VERSION.to_ne_bytes());
        }
        if let Some((reply, segments)) = decode(&bytes) {
            prop_assert_eq!(reply.count as usize, segments.len());
            prop_assert_eq!(bytes.len(), 56 + 32 * segments.len());
        }
    }

    #[test]
    fn segments_of_a_release_are_in_order(
        answers in proptest::collection::vec((0u32..6, 0u32..4, 0u32..4, proptest::collection::vec((0u64..8, 0u64..3), 0..3)), 0..8)
    ) {
        let mut receipt = Receipt::default();
        for (status, first, total, pieces) in answers {
            let segments: Vec<_> = pieces.iter().map(|(address, len)| segment(*address, *len)).collect();
            let bytes = segments.iter().map(|segment| segment.len).sum();
            let answer = Reply { status, first, ..all(total, bytes) };
            if receipt.absorb(&answer, &segments, descriptors(segments.len())).is_err() {
                break;
            }
            if let Some(held) = receipt.take() {
                for pair in held.windows(2) {
                    prop_assert!(pair[0].segment.address + pair[0].segment.len <= pair[1].segment.address);
                }
                prop_assert!(held.iter().all(|held| held.segment.len > 0));
            }
        }
    }

    #[test]
    fn the_table_is_a_map_by_address(steps in proptest::collection::vec((any::<bool>(), 0u64..40), 0..200)) {
        let mut table = empty_table();
        let mut model = BTreeMap::new();
        for (step, (is_insert, place)) in steps.into_iter().enumerate() {
            let address = place * 4 * MIB;
            if is_insert {
                let entry = table::Entry { address, len: 2 * MIB, id: step as u64, ..table::Entry::NONE };
                prop_assert_eq!(table.insert(entry), !model.contains_key(&address));
                model.entry(address).or_insert(entry);
            } else {
                let position = table.at(address);
                prop_assert_eq!(position.is_some(), model.remove(&address).is_some());
                if let Some(position) = position {
                    table.remove(position);
                }
            }
            prop_assert!(table.entries().iter().eq(model.values()));
            prop_assert_eq!(table.around(address), model.get(&address));
            prop_assert_eq!(table.around(address + 2 * MIB - 1), model.get(&address));
            prop_assert_eq!(table.around(address + 2 * MIB), None);
        }
    }
}

#[test]
fn a_full_table_takes_no_more() {
    let mut table = empty_table();
    for place in 0..table::ENTRIES_MAX as u64 {
        assert!(!table.is_full());
        assert!(table.insert(table::Entry {
            address: place.reverse_bits(),
            ..table::Entry::NONE
        }));
    }
    assert!(table.is_full());
    assert!(!table.insert(table::Entry {
        address: 1,
        ..table::Entry::NONE
    }));
    assert!(table.entries().is_sorted_by_key(|entry| entry.address));
}

/// Returns the table that all tests share: it is too large for a stack.
fn empty_table() -> MutexGuard<'static, table::Table<table::Entry>> {
    static TABLE: Mutex<table::Table<table::Entry>> =
        Mutex::new(table::Table::new(table::Entry::ZEROS));
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    table.clear();
    table
}

/// Binds a socket with an agent's name, and creates its client.
fn pretender(token: &Token) -> UnixDatagram {
    let name = format!("ckpt-run-agent/{token}/7");
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
}

/// Encodes a reply without segments.
fn bytes(reply: &Reply) -> Vec<u8> {
    let words = [
        reply.magic,
        reply.version,
        reply.kind,
        reply.status,
        reply.code.cast_unsigned(),
        reply.thread.cast_unsigned(),
        reply.first,
        reply.count,
        reply.total,
        reply.flags,
    ];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend(reply.bytes.to_ne_bytes());
    bytes.extend(reply.serial.to_ne_bytes());
    bytes
}

#[test]
fn only_the_agents_own_answer_to_this_request_counts() {
    let token = Token::random().unwrap();
    let socket = pretender(&token);
    let asked = std::thread::scope(|scope| {
        let hello = scope.spawn(|| {
            let mut channel = Channel::bind().unwrap();
            channel.agent(&token, 7).hello(LIMIT)
        });
        let mut request = [0; 100];
        let (len, from) = socket.recv_from(&mut request).unwrap();
        assert_eq!(len, size_of::<Request>());
        let good = Reply {
            total: 3,
            flags: wire::IMPORTED,
            ..reply(wire::HELLO, wire::OK)
        };
        let stranger = UnixDatagram::unbound().unwrap();
        let other = Reply { total: 9, ..good };
        let stale = Reply { serial: 0, ..other };
        let from = SocketAddr::from_abstract_name(from.as_abstract_name().unwrap()).unwrap();
        stranger.send_to_addr(&bytes(&other), &from).unwrap();
        socket.send_to_addr(&bytes(&stale), &from).unwrap();
        socket.send_to_addr(&bytes(&good), &from).unwrap();
        hello.join().unwrap()
    });
    let hello = asked.unwrap().unwrap();
    assert_eq!((hello.segments, hello.thread), (3, 5));
    assert!(hello.imported && !hello.released && !hello.shares);
}

#[test]
fn an_agent_that_talks_nonsense_is_found_out() {
    let good = reply(wire::HELLO, wire::OK);
    let cases = [
        b"x".to_vec(),
        [bytes(&good), vec![0]].concat(),
        bytes(&Reply { count: 1, ..good }),
        bytes(&Reply {
            version: wire::VERSION - 1,
            ..good
        }),
        bytes(&Reply {
            kind: wire::MAP,
            ..good
        }),
        bytes(&Reply { status: 99, ..good }),
        [bytes(&Reply { count: 1, ..good }), vec![1; 32]].concat(),
        vec![0; 4000],
    ];
    for case in cases {
        let token = Token::random().unwrap();
        let socket = pretender(&token);
        std::thread::scope(|scope| {
            let hello = scope.spawn(|| {
                let mut channel = Channel::bind().unwrap();
                channel.agent(&token, 7).hello(LIMIT)
            });
            let (_, from) = socket.recv_from(&mut [0; 100]).unwrap();
            let from = SocketAddr::from_abstract_name(from.as_abstract_name().unwrap()).unwrap();
            socket.send_to_addr(&case, &from).unwrap();
            let hello = hello.join().unwrap();
            assert!(
                matches!(hello, Err(AgentError::Malformed { .. })),
                "{case:?} {hello:?}"
            );
        });
    }
}

#[test]
fn missing_socket_is_no_agent_and_silence_is_a_timeout() {
    let token = Token::random().unwrap();
    let mut channel = Channel::bind().unwrap();
    assert_eq!(channel.agent(&token, 7).hello(LIMIT).unwrap(), None);
    assert!(matches!(
        channel.agent(&token, 7).probe(LIMIT),
        Err(AgentError::Gone { .. })
    ));
    let _silent = pretender(&token);
    let soon = Duration::from_millis(20);
    // The agent's queue fills up.
    for _ in 0..20 {
        let asked = channel.agent(&token, 7).hello(soon);
        assert!(
            matches!(asked, Err(AgentError::TimedOut { .. })),
            "{asked:?}"
        );
    }
}

#[test]
fn a_process_that_exits_unanswered_is_gone_at_once() {
    let token = Token::random().unwrap();
    let socket = pretender(&token);
    let mut process = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(process.id()).unwrap();
    let asked = std::thread::scope(|scope| {
        let hello = scope.spawn(|| {
            let mut channel = Channel::bind().unwrap();
            let agent = channel.agent(&token, 7);
            agent.while_alive(pid).hello(Duration::from_secs(600))
        });
        socket.recv_from(&mut [0; 100]).unwrap();
        // The exited process has not been waited for, so it is a zombie; the socket stays open, as one that a child
        // inherited does.
        drop(process.stdin.take());
        hello.join().unwrap()
    });
    process.wait().unwrap();
    assert_eq!(asked.unwrap(), None);
}

#[test]
fn a_request_has_the_agents_layout() {
    let request = Request {
        magic: 1,
        version: 2,
        kind: 3,
        first: 4,
        count: 5,
        reserved: 6,
        serial: 7,
    };
    let bytes = encode(&request);
    let words: Vec<u32> = bytes[..24]
        .chunks(4)
        .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
        .collect();
    assert_eq!(words, [1, 2, 3, 4, 5, 6]);
    assert_eq!(bytes[24..], 7u64.to_ne_bytes());
    assert_eq!(std::mem::offset_of!(Request, serial), 24);
    assert_eq!(std::mem::offset_of!(Reply, bytes), 40);
}
