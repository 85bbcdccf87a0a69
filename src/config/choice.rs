//! The words that stand for the values of an enum in files, variables and flags.

use super::model::{IoUring, Isolation, LogLevel, Memory, Nccl, OnLost, ShowProgress, Tcp, Watch};
use super::restart_settings::{RestartPolicy, WithoutImage};
use super::value::Choice;

impl Choice for Isolation {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("namespaces", Self::Namespaces),
        ("none", Self::None),
    ];
}

impl Choice for IoUring {
    const WORDS: &'static [(&'static str, Self)] = &[("hide", Self::Hide), ("allow", Self::Allow)];
}

impl Choice for RestartPolicy {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("no", Self::No),
        ("on-failure", Self::OnFailure),
        ("on-abnormal", Self::OnAbnormal),
        ("always", Self::Always),
    ];
}

impl Choice for WithoutImage {
    const WORDS: &'static [(&'static str, Self)] =
        &[("start", Self::Start), ("give-up", Self::GiveUp)];
}

impl Choice for Tcp {
    const WORDS: &'static [(&'static str, Self)] = &[("close", Self::Close), ("keep", Self::Keep)];
}

impl Choice for Watch {
    const WORDS: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("off", Self::Off)];
}

impl Choice for OnLost {
    const WORDS: &'static [(&'static str, Self)] =
        &[("refuse", Self::Refuse), ("warn", Self::Warn)];
}

impl Choice for Memory {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("resident", Self::Resident),
        ("driver", Self::Driver),
    ];
}

impl Choice for Nccl {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("auto", Self::Auto),
        ("checkpointable", Self::Checkpointable),
        ("peer", Self::Peer),
        ("off", Self::Off),
    ];
}

impl Choice for ShowProgress {
    const WORDS: &'static [(&'static str, Self)] = &[("auto", Self::Auto), ("never", Self::Never)];
}

impl Choice for LogLevel {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("off", Self::Off),
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];
}
