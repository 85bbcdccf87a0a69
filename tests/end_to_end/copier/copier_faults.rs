//! Faults of the copier: wrong lengths, lack of memory, wrong callers, and processes that die.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use ckpt_run::copier::{Copier, CopierError, SegmentId};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::contents::{MIB, assert_same, bytes, drain, fill, try_drain, try_fill};
use super::copier_machine::{Machine, environment, gpu};
use crate::harness::program;

/// Time limit for the end of a process.
const END_MS_MAX: u16 = 20_000;
/// Variable with the copier's program, for the test process that is started to be killed.
const PROGRAM: &str = "COPIER_TEST_PROGRAM";

fn ended(pid: i32) -> bool {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    let Ok(process) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
        return true;
    };
    let mut seen = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    poll(&mut seen, PollTimeout::from(END_MS_MAX)).unwrap() == 1
}

#[test]
fn wrong_lengths_are_errors() {
    let machine = Machine::of_mib(64);
    let (owner, copier) = (machine.open(), machine.open());
    let (_, memory) = owner.create(gpu(0), 8 * MIB).unwrap();
    for len in [
        0,
        1,
        2 * MIB,
        8 * MIB - 1,
        8 * MIB + 1,
        10 * MIB,
        u64::MAX,
        u64::MAX << 21,
    ] {
        let error = copier.import(gpu(0), memory.as_fd(), len).unwrap_err();
        assert!(
            matches!(error, CopierError::Device { .. }),
            "{len}: {error}"
        );
    }
    for len in [0, 1, 2 * MIB + 1] {
        let error = owner.create(gpu(0), len).unwrap_err();
        assert!(
            matches!(error, CopierError::Device { .. }),
            "{len}: {error}"
        );
    }
    let nothing = File::open("/dev/null").unwrap();
    let error = copier.import(gpu(0), nothing.as_fd(), 8 * MIB).unwrap_err();
    assert!(
        error.to_string().contains("cuMemImportFromShareableHandle"),
        "{error}"
    );
    let segment = copier.import(gpu(0), memory.as_fd(), 8 * MIB).unwrap();
    let mut lane = copier.lane().unwrap();
    #[allow(
        clippy::reversed_empty_ranges,
        reason = "one of the things that are refused"
    )]
    for range in [0..8 * MIB + 1, 8 * MIB + 1..8 * MIB + 1, 5..4, 0..u64::MAX] {
        let error = try_drain(&mut lane, segment, range.clone()).unwrap_err();
        assert!(matches!(error, CopierError::Refused { .. }), "{error}");
        let content = bytes(1, 20 * MIB);
        let error = try_fill(&mut lane, segment, range, &content).unwrap_err();
        assert!(matches!(error, CopierError::Refused { .. }), "{error}");
    }
    fill(&mut lane, segment, 0..MIB, &bytes(2, MIB));
    assert_same(&drain(&mut lane, segment, 0..MIB), &bytes(2, MIB));
}

#[test]
fn missing_segments_are_refused() {
    let machine = Machine::of_mib(64);
    let copier = machine.copier();
    let error = copier.lane().unwrap_err();
    assert!(error.to_string().contains("no GPU was opened"), "{error}");
    let error = copier.open(gpu(1)).unwrap_err();
    assert!(matches!(error, CopierError::Device { .. }), "{error}");
    assert!(error.to_string().contains(&gpu(1).to_string()), "{error}");
    let error = copier.create(gpu(0), 2 * MIB).unwrap_err();
    assert!(matches!(error, CopierError::Refused { .. }), "{error}");
    copier.open(gpu(0)).unwrap();
    let (segment, _) = copier.create(gpu(0), 2 * MIB).unwrap();
    let twice = copier.shadow(&[segment, segment]).unwrap_err();
    assert!(matches!(twice, CopierError::Refused { .. }), "{twice}");
    copier.release(&[segment]).unwrap();
    let gone = copier.release(&[segment]).unwrap_err();
    assert!(matches!(gone, CopierError::Refused { .. }), "{gone}");
    let mut lane = copier.lane().unwrap();
    let gone = try_drain(&mut lane, segment, 0..1).unwrap_err();
    assert!(matches!(gone, CopierError::Refused { .. }), "{gone}");
}

#[test]
fn too_little_memory_leaves_the_copier_usable() {
    let machine = Machine::of_mib(64);
    let copier = machine.open();
    for bytes in [64 * MIB, u64::MAX] {
        let error = copier.reserve(gpu(0), bytes).unwrap_err();
        assert!(matches!(error, CopierError::OutOfMemory { .. }), "{error}");
    }
    let error = copier.create(gpu(0), 64 * MIB).unwrap_err();
    assert!(matches!(error, CopierError::OutOfMemory { .. }), "{error}");
    assert!(error.to_string().contains("cuMemCreate"), "{error}");
    let (segment, _memory) = copier.create(gpu(0), 32 * MIB).unwrap();
    let mut lane = copier.lane().unwrap();
    fill(&mut lane, segment, 0..MIB, &bytes(1, MIB));
    assert_same(&drain(&mut lane, segment, 0..MIB), &bytes(1, MIB));
}

/// Error that ends a copy on the caller's side.
#[derive(Debug)]
enum Ours {
    Enough,
    Copier,
}

impl From<CopierError> for Ours {
    fn from(_: CopierError) -> Self {
        Self::Copier
    }
}

#[test]
fn a_caller_that_gives_up_harms_no_later_copy() {
    let machine = Machine::of_mib(64);
    let copier = machine.open();
    let len = 32 * MIB;
    let (segment, _memory) = copier.create(gpu(0), len).unwrap();
    let mut lane = copier.lane().unwrap();
    for pieces in 0..3 {
        let mut left = pieces;
        let mut give_up = || {
            left -= 1;
            if left < 0 { Err(Ours::Enough) } else { Ok(()) }
        };
        let drained = lane.drain(segment, 0..len, |_| give_up());
        assert!(matches!(drained, Err(Ours::Enough)), "{drained:?}");
        left = pieces;
        let mut give_up = || {
            left -= 1;
            if left < 0 { Err(Ours::Enough) } else { Ok(()) }
        };
        let filled = lane.fill(segment, 0..len, |room| give_up().map(|()| room.len()));
        assert!(matches!(filled, Err(Ours::Enough)), "{filled:?}");
        fill(&mut lane, segment, 0..len, &bytes(2, len));
        assert_same(&drain(&mut lane, segment, 0..len), &bytes(2, len));
    }
}

/// Performs every operation of a copier once; returns the remaining state.
fn everything(
    copier: &Copier,
    memory: &impl AsFd,
    had: &mut Vec<SegmentId>,
) -> Result<(), CopierError> {
    let len = 4 * MIB;
    copier.open(gpu(0))?;
    had.push(copier.import(gpu(0), memory.as_fd(), len)?);
    let (created, _memory) = copier.create(gpu(0), len)?;
    had.push(created);
    let mut lane = copier.lane()?;
    try_drain(&mut lane, created, 0..1)?;
    try_fill(&mut lane, created, 0..1, &[7])?;
    copier.reserve(gpu(0), len)?;
    assert_eq!(copier.shadow(had)?, [len, 0]);
    Ok(())
}

#[test]
fn failed_driver_call_is_named_and_leaves_no_memory() {
    let machine = Machine::of_mib(64);
    let (owner, copier) = (machine.open(), machine.open());
    let (_, memory) = owner.create(gpu(0), 4 * MIB).unwrap();
    let before = machine.gpus.used_bytes(0);
    let rules = machine.gpus.folder().join("caller-fail");
    for call in [
        "cuMemGetInfo_v2",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemHostRegister_v2",
        "cuStreamCreate",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamSynchronize",
        "cuMemAlloc_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuCtxSetCurrent",
    ] {
        fs::write(&rules, call).unwrap();
        let mut had = Vec::new();
        let error = everything(&copier, &memory, &mut had).unwrap_err();
        fs::remove_file(&rules).unwrap();
        let name = call.trim_end_matches("_v2");
        assert!(
            matches!(error, CopierError::Device { .. }),
            "{call}: {error}"
        );
        assert!(error.to_string().contains(name), "{call}: {error}");
        copier.release(&had).unwrap();
        // Memory reserved for a failed shadow is available for another one.
        copier.shadow(&[]).unwrap();
        let mut had = Vec::new();
        everything(&copier, &memory, &mut had).unwrap();
        copier.release(&had).unwrap();
        machine.gpus.assert_used(0, before, call);
    }
}

#[test]
fn a_copier_that_was_killed_fails_all_that_wait_for_it() {
    let machine = Machine::of_mib(64);
    let copier = machine.open();
    let (segment, _memory) = copier.create(gpu(0), 32 * MIB).unwrap();
    let mut lane = copier.lane().unwrap();
    let mut pieces = 0;
    let drained: Result<(), CopierError> = lane.drain(segment, 0..32 * MIB, |_| {
        pieces += 1;
        // The copier is in the middle of the copy.
        if pieces == 1 {
            kill(Pid::from_raw(pid(&copier)), Signal::SIGKILL).unwrap();
        }
        Ok(())
    });
    let error = drained.unwrap_err();
    assert!(matches!(error, CopierError::Gone { .. }), "{error}");
    assert!(pieces <= 2, "{pieces} pieces of a copier that is dead");
    let error = try_drain(&mut lane, segment, 0..1).unwrap_err();
    assert!(matches!(error, CopierError::Gone { .. }), "{error}");
    for _ in 0..2 {
        let error = copier.open(gpu(0)).unwrap_err();
        assert!(matches!(error, CopierError::Gone { .. }), "{error}");
    }
    let error = copier.lane().unwrap_err();
    assert!(matches!(error, CopierError::Gone { .. }), "{error}");
}

#[test]
fn a_copier_that_is_dropped_has_ended_and_its_memory_is_free() {
    let machine = Machine::of_mib(64);
    let copier = machine.open();
    let (segment, memory) = copier.create(gpu(0), 32 * MIB).unwrap();
    drop(memory);
    let mut lane = copier.lane().unwrap();
    drop(copier);
    machine.gpus.assert_used(0, 0, "all have ended");
    let error = try_drain(&mut lane, segment, 0..1).unwrap_err();
    assert!(matches!(error, CopierError::Gone { .. }), "{error}");
}

#[test]
fn another_program_is_recognized() {
    for program in ["/bin/cat", "/bin/yes", "/bin/true"] {
        let error = Copier::start(Path::new(program)).unwrap_err();
        assert!(matches!(error, CopierError::NotACopier { .. }), "{error}");
        assert!(error.to_string().contains("helper_main"), "{error}");
    }
    let error = Copier::start(Path::new("/nonexistent/copier")).unwrap_err();
    assert!(matches!(error, CopierError::Start { .. }), "{error}");
}

#[test]
fn manual_start_of_the_copier_prints_an_explanation() {
    let output = Command::new(program())
        .arg("gpu-copier")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("the supervisor starts it"), "{said}");
}

/// Process that the next test kills; not a test of its own.
#[test]
fn a_parent_for_the_next_test() {
    let Some(program) = std::env::var_os(PROGRAM) else {
        return;
    };
    // The starting thread may end, as threads of a pool do.
    let start = move || Copier::start(Path::new(&program)).unwrap();
    let copier = thread::spawn(start).join().unwrap();
    copier.open(gpu(0)).unwrap();
    println!("\nCOPIER {}", copier.pid());
    loop {
        thread::park();
    }
}

#[test]
fn copier_exits_with_its_parent_and_sees_all_gpus() {
    let machine = Machine::of_mib(64);
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "copier::copier_faults::a_parent_for_the_next_test",
            "--nocapture",
        ])
        .env(PROGRAM, machine.program())
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("LD_PRELOAD", "/nonexistent/agent.so")
        .env("CKPT_RUN_AGENT", "0123")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines();
    let pid = lines.find_map(|line| Some(line.unwrap().strip_prefix("COPIER ")?.parse().unwrap()));
    let pid: i32 = pid.unwrap();
    let seen = environment(&machine.program());
    for name in ["CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "CKPT_RUN_AGENT"] {
        assert!(!seen.lines().any(|line| line.starts_with(name)), "{name}");
    }
    assert!(Path::new(&format!("/proc/{pid}")).exists());
    parent.kill().unwrap();
    parent.wait().unwrap();
    assert!(ended(pid));
}

fn pid(copier: &Copier) -> i32 {
    i32::try_from(copier.pid()).unwrap()
}
