//! The table of all keys: path, check, setter and display form of each.
//!
//! Files, variables, flags and `config show` all use this one table. A new setting is a field in `model`, a row here
//! and a paragraph in `config/default.toml`; tests keep the three consistent.

use toml::Value as Shown;

use super::limits::{
    BACKOFF_FACTOR, CRIU_LOG_LEVEL, FILES_FREEZE, HANG, KEEP_CONTENT, KEEP_LAST, KEEP_PERIODS,
    KEEP_WITHIN, LEVEL, LOCK_TIMEOUT, MAX_OVERHEAD, MIN_FREE, MTBF, RESTORE_BUFFER, WAIT,
    WAIT_OR_NOT,
};
use super::operation::{hook, interval, jitter, limit, show_hook, show_jitter, show_limit};
use super::reading::address;
use super::reading::{
    buffer, command, cpus, cron, duration, narrow, optional, optional_path, optional_text, path,
    patterns, shown_path, size, tty, word,
};
use super::restart_settings::{prevent, restarts};
use super::units::{format_exit_status, format_percent};
use super::value::Value;
use super::{Buffer, Config, Cpus, Encryption, Interval, Invalid, RestartLimit, Tty};

/// A setting.
pub(super) struct Key {
    /// The key's path: "section.name", or "name".
    pub(super) path: &'static str,
    /// Checks a value and sets it; a refused value changes nothing.
    pub(super) set: fn(&mut Config, &Value) -> Result<(), Invalid>,
    /// Returns the value in its form in a file.
    pub(super) get: fn(&Config) -> Shown,
}

impl Key {
    /// Returns the section (empty for the keys above all sections) and the name within it.
    pub(super) fn split(&self) -> (&'static str, &'static str) {
        self.path.rsplit_once('.').unwrap_or(("", self.path))
    }

    /// Returns the name of the environment variable that sets the key.
    pub(super) fn variable(&self) -> String {
        format!("CKPT_RUN_{}", self.path.replace('.', "_").to_uppercase())
    }
}

/// Paths of the two keys that exclude each other.
pub(super) const INTERVAL_PATH: &str = "snapshot.interval";
pub(super) const CRON_PATH: &str = "snapshot.cron";
/// Paths of the two other keys that exclude each other.
pub(super) const KEY_FILE_PATH: &str = "encryption.key_file";
pub(super) const KEY_COMMAND_PATH: &str = "encryption.key_command";
/// Paths of the two waits that limit each other.
pub(super) const BACKOFF_PATH: &str = "restart.backoff";
pub(super) const BACKOFF_MAX_PATH: &str = "restart.backoff_max";
/// Paths of the NCCL and memory keys, which exclude each other in one combination.
pub(super) const NCCL_PATH: &str = "cuda.nccl";
pub(super) const MEMORY_PATH: &str = "cuda.memory";

pub(super) const LISTEN_PATH: &str = "metrics.listen";
pub(super) const ALLOW_REMOTE_PATH: &str = "metrics.allow_remote";
/// The key that also has a short environment variable.
pub(super) const CRIU_PATH: &str = "criu.path";

/// Generates the row of a command in `[hooks]`.
macro_rules! hook_key {
    ($occasion:ident) => {
        Key {
            path: concat!("hooks.", stringify!($occasion)),
            set: |config, value| set(&mut config.hooks.$occasion, hook(value)),
            get: |config| show_hook(config.hooks.$occasion.as_ref()),
        }
    };
}

/// Every setting, in the order of `config/default.toml`.
pub(super) const KEYS: &[Key] = &[
    Key {
        path: "store",
        set: |config, value| set(&mut config.store, path(value)),
        get: |config| Shown::String(config.store.to_string_lossy().into_owned()),
    },
    Key {
        path: "isolation",
        set: |config, value| set(&mut config.isolation, value.choice()),
        get: |config| word(config.isolation),
    },
    Key {
        path: "user",
        set: |config, value| set(&mut config.user, optional_text(value)),
        get: |config| optional(config.user.clone()),
    },
    Key {
        path: "tty",
        set: |config, value| set(&mut config.tty, tty(value)),
        get: |config| match config.tty {
            Tty::Auto => Shown::from("auto"),
            Tty::Always => Shown::Boolean(true),
            Tty::Never => Shown::Boolean(false),
        },
    },
    Key {
        path: "sandbox.io_uring",
        set: |config, value| set(&mut config.sandbox.io_uring, value.choice()),
        get: |config| word(config.sandbox.io_uring),
    },
    Key {
        path: INTERVAL_PATH,
        set: |config, value| set(&mut config.snapshot.interval, interval(value)),
        get: |config| match config.snapshot.interval {
            Interval::Never => Shown::from("never"),
            Interval::Auto => Shown::from("auto"),
            Interval::Every(time) => duration(time),
        },
    },
    Key {
        path: CRON_PATH,
        set: |config, value| set(&mut config.snapshot.cron, cron(value)),
        get: |config| optional(config.snapshot.cron.as_ref().map(ToString::to_string)),
    },
    Key {
        path: "snapshot.mtbf",
        set: |config, value| set(&mut config.snapshot.mtbf, value.duration(&MTBF)),
        get: |config| duration(config.snapshot.mtbf),
    },
    Key {
        path: "snapshot.max_overhead",
        set: |config, value| {
            let share = value.percent(&MAX_OVERHEAD);
            set(&mut config.snapshot.max_overhead, share)
        },
        get: |config| Shown::String(format_percent(config.snapshot.max_overhead)),
    },
    Key {
        path: "snapshot.jitter",
        set: |config, value| set(&mut config.snapshot.jitter, jitter(value)),
        get: |config| show_jitter(config.snapshot.jitter),
    },
    Key {
        path: "snapshot.buffer",
        set: |config, value| set(&mut config.snapshot.buffer, buffer(value)),
        get: |config| match config.snapshot.buffer {
            Buffer::Auto => Shown::from("auto"),
            Buffer::Bytes(bytes) => size(bytes),
        },
    },
    Key {
        path: "snapshot.min_free",
        set: |config, value| set(&mut config.snapshot.min_free, value.size(&MIN_FREE)),
        get: |config| size(config.snapshot.min_free),
    },
    Key {
        path: "snapshot.grace",
        set: |config, value| set(&mut config.snapshot.grace, value.duration(&WAIT_OR_NOT)),
        get: |config| duration(config.snapshot.grace),
    },
    Key {
        path: "snapshot.lock_timeout",
        set: |config, value| {
            let timeout = value.duration(&LOCK_TIMEOUT);
            set(&mut config.snapshot.lock_timeout, timeout)
        },
        get: |config| duration(config.snapshot.lock_timeout),
    },
    Key {
        path: "snapshot.timeout",
        set: |config, value| set(&mut config.snapshot.timeout, value.duration(&WAIT)),
        get: |config| duration(config.snapshot.timeout),
    },
    Key {
        path: "snapshot.level",
        set: |config, value| set(&mut config.snapshot.level, narrow(value, &LEVEL)),
        get: |config| Shown::from(config.snapshot.level),
    },
    Key {
        path: "snapshot.cpus",
        set: |config, value| set(&mut config.snapshot.cpus, cpus(value)),
        get: |config| match config.snapshot.cpus {
            Cpus::Auto => Shown::from("auto"),
            Cpus::Count(count) => Shown::Integer(count.get().try_into().unwrap_or(i64::MAX)),
        },
    },
    Key {
        path: "retention.keep_last",
        set: |config, value| set(&mut config.retention.keep_last, narrow(value, &KEEP_LAST)),
        get: |config| Shown::from(config.retention.keep_last),
    },
    Key {
        path: "retention.keep_within",
        set: |config, value| {
            let time = value.duration(&KEEP_WITHIN);
            set(&mut config.retention.keep_within, time)
        },
        get: |config| duration(config.retention.keep_within),
    },
    Key {
        path: "retention.keep_hourly",
        set: |config, value| {
            let hours = narrow(value, &KEEP_PERIODS);
            set(&mut config.retention.keep_hourly, hours)
        },
        get: |config| Shown::from(config.retention.keep_hourly),
    },
    Key {
        path: "retention.keep_daily",
        set: |config, value| {
            let days = narrow(value, &KEEP_PERIODS);
            set(&mut config.retention.keep_daily, days)
        },
        get: |config| Shown::from(config.retention.keep_daily),
    },
    Key {
        path: KEY_FILE_PATH,
        set: |config, value| {
            let file = optional_path(value)?.map(Encryption::KeyFile);
            set_encryption(config, KEY_FILE_PATH, file);
            Ok(())
        },
        get: |config| match &config.encryption {
            Encryption::KeyFile(path) => Shown::String(path.to_string_lossy().into_owned()),
            Encryption::KeyCommand(_) | Encryption::Off => optional(None),
        },
    },
    Key {
        path: KEY_COMMAND_PATH,
        set: |config, value| {
            let command = command(value)?.map(Encryption::KeyCommand);
            set_encryption(config, KEY_COMMAND_PATH, command);
            Ok(())
        },
        get: |config| match &config.encryption {
            Encryption::KeyCommand(command) => Shown::from(command.as_str()),
            Encryption::KeyFile(_) | Encryption::Off => optional(None),
        },
    },
    Key {
        path: "restart.policy",
        set: |config, value| set(&mut config.restart.policy, value.choice()),
        get: |config| word(config.restart.policy),
    },
    Key {
        path: "restart.max",
        set: |config, value| set(&mut config.restart.max, restarts(value)),
        get: |config| match config.restart.max {
            RestartLimit::Auto => Shown::from("auto"),
            RestartLimit::Unlimited => Shown::Integer(-1),
            RestartLimit::Times(times) => Shown::from(times),
        },
    },
    Key {
        path: BACKOFF_PATH,
        set: |config, value| set(&mut config.restart.backoff, value.duration(&WAIT_OR_NOT)),
        get: |config| duration(config.restart.backoff),
    },
    Key {
        path: "restart.backoff_factor",
        set: |config, value| {
            let factor = value.float(&BACKOFF_FACTOR);
            set(&mut config.restart.backoff_factor, factor)
        },
        get: |config| Shown::Float(config.restart.backoff_factor),
    },
    Key {
        path: BACKOFF_MAX_PATH,
        set: |config, value| {
            let longest = value.duration(&WAIT_OR_NOT);
            set(&mut config.restart.backoff_max, longest)
        },
        get: |config| duration(config.restart.backoff_max),
    },
    Key {
        path: "restart.prevent",
        set: |config, value| set(&mut config.restart.prevent, prevent(value)),
        get: |config| {
            let ends = config.restart.prevent.iter();
            Shown::Array(ends.map(|end| format_exit_status(*end).into()).collect())
        },
    },
    Key {
        path: "restart.without_image",
        set: |config, value| set(&mut config.restart.without_image, value.choice()),
        get: |config| word(config.restart.without_image),
    },
    Key {
        path: "hang.output",
        set: |config, value| set(&mut config.hang.output, limit(value)),
        get: |config| show_limit(config.hang.output),
    },
    Key {
        path: "hang.gpu",
        set: |config, value| set(&mut config.hang.gpu, limit(value)),
        get: |config| show_limit(config.hang.gpu),
    },
    Key {
        path: "hang.cpu",
        set: |config, value| set(&mut config.hang.cpu, limit(value)),
        get: |config| show_limit(config.hang.cpu),
    },
    Key {
        path: "hang.heartbeat",
        set: |config, value| set(&mut config.hang.heartbeat, optional_path(value)),
        get: |config| {
            let given = config.hang.heartbeat.as_ref();
            optional(given.map(|path| path.to_string_lossy().into_owned()))
        },
    },
    Key {
        path: "hang.heartbeat_timeout",
        set: |config, value| set(&mut config.hang.heartbeat_timeout, value.duration(&HANG)),
        get: |config| duration(config.hang.heartbeat_timeout),
    },
    Key {
        path: "hang.action",
        set: |config, value| set(&mut config.hang.action, value.choice()),
        get: |config| word(config.hang.action),
    },
    hook_key!(before_snapshot),
    hook_key!(after_snapshot),
    hook_key!(after_restore),
    hook_key!(on_give_up),
    hook_key!(on_hang),
    Key {
        path: "hooks.timeout",
        set: |config, value| set(&mut config.hooks.timeout, value.duration(&WAIT)),
        get: |config| duration(config.hooks.timeout),
    },
    Key {
        path: "restore.buffer",
        set: |config, value| set(&mut config.restore.buffer, value.size(&RESTORE_BUFFER)),
        get: |config| size(config.restore.buffer),
    },
    Key {
        path: "network.tcp",
        set: |config, value| set(&mut config.network.tcp, value.choice()),
        get: |config| word(config.network.tcp),
    },
    Key {
        path: "files.keep_content",
        set: |config, value| set(&mut config.files.keep_content, value.size(&KEEP_CONTENT)),
        get: |config| size(config.files.keep_content),
    },
    Key {
        path: "files.keep_total",
        set: |config, value| set(&mut config.files.keep_total, value.size(&KEEP_CONTENT)),
        get: |config| size(config.files.keep_total),
    },
    Key {
        path: "files.freeze",
        set: |config, value| set(&mut config.files.freeze, value.duration(&FILES_FREEZE)),
        get: |config| duration(config.files.freeze),
    },
    Key {
        path: "files.watch",
        set: |config, value| set(&mut config.files.watch, value.choice()),
        get: |config| word(config.files.watch),
    },
    Key {
        path: "files.include",
        set: |config, value| set(&mut config.files.include, patterns(value)),
        get: |config| Shown::from(config.files.include.clone()),
    },
    Key {
        path: "files.exclude",
        set: |config, value| set(&mut config.files.exclude, patterns(value)),
        get: |config| Shown::from(config.files.exclude.clone()),
    },
    Key {
        path: "files.on_lost",
        set: |config, value| set(&mut config.files.on_lost, value.choice()),
        get: |config| word(config.files.on_lost),
    },
    Key {
        path: NCCL_PATH,
        set: |config, value| set(&mut config.cuda.nccl, value.choice()),
        get: |config| word(config.cuda.nccl),
    },
    Key {
        path: MEMORY_PATH,
        set: |config, value| set(&mut config.cuda.memory, value.choice()),
        get: |config| word(config.cuda.memory),
    },
    Key {
        path: CRIU_PATH,
        set: |config, value| set(&mut config.criu.path, optional_path(value)),
        get: |config| shown_path(config.criu.path.as_ref()),
    },
    Key {
        path: "criu.log_level",
        set: |config, value| set(&mut config.criu.log_level, narrow(value, &CRIU_LOG_LEVEL)),
        get: |config| Shown::Integer(config.criu.log_level.into()),
    },
    Key {
        path: "log.level",
        set: |config, value| set(&mut config.log.level, value.choice()),
        get: |config| word(config.log.level),
    },
    Key {
        path: "log.progress",
        set: |config, value| set(&mut config.log.progress, value.choice()),
        get: |config| word(config.log.progress),
    },
    Key {
        path: "log.events",
        set: |config, value| set(&mut config.log.events, optional_path(value)),
        get: |config| shown_path(config.log.events.as_ref()),
    },
    Key {
        path: "metrics.textfile",
        set: |config, value| set(&mut config.metrics.textfile, optional_path(value)),
        get: |config| shown_path(config.metrics.textfile.as_ref()),
    },
    Key {
        path: LISTEN_PATH,
        set: |config, value| set(&mut config.metrics.listen, address(value)),
        get: |config| optional(config.metrics.listen.map(|address| address.to_string())),
    },
    Key {
        path: ALLOW_REMOTE_PATH,
        set: |config, value| set(&mut config.metrics.allow_remote, value.boolean()),
        get: |config| Shown::Boolean(config.metrics.allow_remote),
    },
];

fn set<T>(field: &mut T, value: Result<T, Invalid>) -> Result<(), Invalid> {
    *field = value?;
    Ok(())
}

/// Returns the path of the key that gave this setting.
pub(super) fn encryption_path(encryption: &Encryption) -> Option<&'static str> {
    match encryption {
        Encryption::Off => None,
        Encryption::KeyFile(_) => Some(KEY_FILE_PATH),
        Encryption::KeyCommand(_) => Some(KEY_COMMAND_PATH),
    }
}

/// Sets the encryption. Either key replaces the other; "" clears only a value that its own key has set.
fn set_encryption(config: &mut Config, path: &str, given: Option<Encryption>) {
    let is_own = encryption_path(&config.encryption) == Some(path);
    config.encryption = match given {
        Some(given) => given,
        None if is_own => Encryption::Off,
        None => return,
    };
}
