//! Options of sockets that name a network interface by its index. The interface of that name has another index after a
//! restart of the machine, or on another one.

use std::ffi::c_int;

use nix::errno::Errno;
use nix::libc;
use serde::{Deserialize, Serialize};

use super::multicast::list;

/// Options that name an interface by its index, and whether in the network's byte order.
const INTERFACES: [((c_int, c_int), bool); 3] = [
    ((libc::SOL_IP, libc::IP_UNICAST_IF), true),
    ((libc::SOL_IPV6, libc::IPV6_MULTICAST_IF), false),
    ((libc::SOL_IPV6, libc::IPV6_UNICAST_IF), true),
];

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub index: u32,
    pub name: String,
}

/// Lists the interfaces that are up in the network namespace of a process (a host pid), some several times.
pub(super) fn interfaces_of(pid: i32) -> Vec<Interface> {
    list(pid).into_iter().map(|group| group.interface).collect()
}

/// Returns the value of an option (level, number and value) where an interface that it names, one of `recorded`, has its
/// index among those that are `present`.
pub(super) fn value_here(
    option: &(i32, i32, Vec<u8>),
    recorded: &[Interface],
    present: impl FnOnce() -> Vec<Interface>,
) -> Result<Vec<u8>, Errno> {
    let (level, number, value) = option;
    let index = interface_in(option);
    let Some(then) = recorded.iter().find(|one| Some(one.index) == index) else {
        return Ok(value.clone());
    };
    let mut present = present().into_iter();
    let now = present.find(|one| one.name == then.name);
    let now = now.ok_or(Errno::ENODEV)?.index;
    Ok(if is_in_network_order((*level, *number)) == Some(true) {
        now.to_be_bytes().to_vec()
    } else {
        now.to_ne_bytes().to_vec()
    })
}

/// Returns whether an option names an interface in the network's byte order; `None` if it names none.
fn is_in_network_order(option: (c_int, c_int)) -> Option<bool> {
    let mut found = INTERFACES.iter().filter(|it| it.0 == option);
    found.next().map(|it| it.1)
}

/// Returns the index of the interface that an option names.
pub(super) fn interface_in((level, number, value): &(i32, i32, Vec<u8>)) -> Option<u32> {
    let bytes = <[u8; 4]>::try_from(value.as_slice()).ok()?;
    is_in_network_order((*level, *number)).map(|is_network| {
        if is_network {
            u32::from_be_bytes(bytes)
        } else {
            u32::from_ne_bytes(bytes)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(value: u32) -> Vec<u8> {
        value.to_ne_bytes().to_vec()
    }

    #[test]
    fn interfaces_are_found_by_their_names() {
        let interface = |index, name: &str| Interface {
            index,
            name: name.to_owned(),
        };
        let options = [
            (
                libc::SOL_IP,
                libc::IP_UNICAST_IF,
                7_u32.to_be_bytes().into(),
            ),
            (libc::SOL_IPV6, libc::IPV6_MULTICAST_IF, number(7)),
            (libc::SOL_SOCKET, libc::SO_PEEK_OFF, number(7)),
        ];
        let recorded = [interface(7, "eth0")];
        let here = |present: Vec<Interface>| {
            let value = |option| value_here(option, &recorded, || present.clone());
            options.iter().map(value).collect::<Vec<_>>()
        };
        let moved = here(vec![interface(7, "lo"), interface(9, "eth0")]);
        let expected = [9_u32.to_be_bytes().to_vec(), number(9), number(7)];
        assert_eq!(moved, expected.map(Ok));
        let none = here(vec![interface(7, "lo")]);
        assert_eq!(
            none,
            [Err(Errno::ENODEV), Err(Errno::ENODEV), Ok(number(7))]
        );
    }
}
