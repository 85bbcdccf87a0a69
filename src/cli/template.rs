//! `ckpt-run template`: complete files for schedulers. They are the files in `config/`, with the user's command in
//! place of the example's.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::global::{Failure, Global};
use super::print;
use crate::config::Override;
use crate::run::OURS;

/// Template to print and its values.
#[derive(Debug, Args)]
pub(super) struct TemplateArguments {
    /// Kind of file
    #[arg(value_enum)]
    scheduler: Scheduler,
    /// New file for the result [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Time between snapshots
    #[arg(short, long, value_name = "TIME")]
    interval: Option<String>,
    /// Command line of the job
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Scheduler {
    /// Service: a stop saves the job, a start continues it
    Systemd,
    /// Batch job that is saved before its time limit and requeues itself
    Slurm,
    /// Batch job in a preemptible partition
    SlurmPreempt,
    /// Job with a volume for its store
    Kubernetes,
    /// Dockerfile with CRIU
    Docker,
    /// User data of a spot machine: installation and service
    Spot,
}

/// The notation of words in a file.
#[derive(Debug, Clone, Copy)]
enum Words {
    Shell,
    Systemd,
    /// Strings in brackets, as in YAML and Dockerfiles.
    List,
}

/// A file, and the texts in it that the user's own values replace at every occurrence.
#[derive(Debug, Clone, Copy)]
struct Template {
    name: &'static str,
    text: &'static str,
    words: Words,
    store: &'static str,
    /// The mount point of the volume that contains the store's folder.
    volume: Option<&'static str>,
    interval: &'static str,
    command: &'static str,
}

impl Scheduler {
    fn template(self) -> Template {
        let slurm = Template {
            name: "slurm.sbatch",
            text: include_str!("../../config/slurm.sbatch"),
            words: Words::Shell,
            store: "$HOME/ckpt-run/train",
            volume: None,
            interval: "--interval 15m",
            command: "-- python train.py",
        };
        match self {
            Self::Slurm => slurm,
            Self::SlurmPreempt => Template {
                name: "slurm-preempt.sbatch",
                text: include_str!("../../config/slurm-preempt.sbatch"),
                ..slurm
            },
            Self::Systemd => Template {
                name: "ckpt-run.service",
                text: include_str!("../../config/ckpt-run.service"),
                words: Words::Systemd,
                store: "/var/lib/ckpt-run/train",
                ..slurm
            },
            Self::Spot => Template {
                name: "spot-user-data.sh",
                text: include_str!("../../config/spot-user-data.sh"),
                words: Words::Systemd,
                store: "/var/lib/ckpt-run/train",
                ..slurm
            },
            Self::Kubernetes => Template {
                name: "kubernetes-job.yaml",
                text: include_str!("../../config/kubernetes-job.yaml"),
                words: Words::List,
                store: r#""/store/train""#,
                volume: Some(r#""/store""#),
                interval: r#""--interval", "15m""#,
                command: r#""--", "python3", "train.py"]"#,
            },
            Self::Docker => Template {
                name: "Dockerfile",
                text: include_str!("../../config/Dockerfile"),
                words: Words::List,
                store: r#""/store/train""#,
                volume: Some(r#""/store""#),
                interval: r#""--interval", "15m""#,
                command: r#"CMD ["python3", "train.py"]"#,
            },
        }
    }
}

impl Words {
    fn one(self, word: &str) -> String {
        match self {
            Self::Shell => shell(word),
            Self::Systemd => systemd(word),
            // A JSON string is also a YAML string.
            Self::List => serde_json::Value::from(word).to_string(),
        }
    }

    fn many(self, words: &[&str]) -> String {
        let separator = match self {
            Self::Shell | Self::Systemd => " ",
            Self::List => ", ",
        };
        let words: Vec<String> = words.iter().map(|word| self.one(word)).collect();
        words.join(separator)
    }
}

/// Returns true if a word needs no quoting in any notation.
fn is_plain(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@".contains(c);
    !word.is_empty() && word.chars().all(plain)
}

fn shell(word: &str) -> String {
    if is_plain(word) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Formats a word of `ExecStart=`: quoted, with its specifiers and variables escaped.
fn systemd(word: &str) -> String {
    if is_plain(word) {
        return word.to_owned();
    }
    let mut quoted = String::from('"');
    for c in word.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '%' | '$' => quoted.extend([c, c]),
            _ => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

impl Template {
    fn filled(&self, store: Option<&str>, interval: Option<&str>, command: &[String]) -> String {
        let words = self.words;
        let mut text = self.text.to_owned();
        if !command.is_empty() {
            let command: Vec<&str> = command.iter().map(String::as_str).collect();
            let filled = if self.command.starts_with("CMD") {
                format!("CMD [{}]", words.many(&command))
            } else {
                let end = if self.command.ends_with(']') { "]" } else { "" };
                format!("{}{end}", words.many(&[&["--"], &command[..]].concat()))
            };
            text = text.replace(self.command, &filled);
        }
        if let Some(interval) = interval {
            text = text.replace(self.interval, &words.many(&["--interval", interval]));
        }
        if let Some(store) = store {
            text = text.replace(self.store, &words.one(store));
            let parent = Path::new(store).parent().and_then(Path::to_str);
            if let Some((volume, parent)) = self.volume.zip(parent) {
                text = text.replace(volume, &words.one(parent));
            }
        }
        text
    }
}

pub(super) fn run(global: &Global, arguments: &TemplateArguments) -> Result<ExitCode, Failure> {
    let interval = arguments.interval.clone().map(|value| Override {
        key: "snapshot.interval",
        flag: "--interval",
        value,
    });
    // A time that a run would refuse is already refused here.
    global.load(interval.into_iter().collect())?;
    let words = arguments.command.iter().chain(&global.store);
    if let Some(word) = words.into_iter().find(|word| word.contains(['\0', '\n'])) {
        return Err(refused(format!(
            "{word:?} contains a line break, which this file cannot represent; put the command into a script"
        )));
    }
    let template = arguments.scheduler.template();
    if let Some(store) = global
        .store
        .as_deref()
        .filter(|_| template.volume.is_some())
        && !is_in_volume(store)
    {
        return Err(refused(format!(
            "--store {store}: in a container the store must be a folder below the mount point of a volume, such as \
             /store/train"
        )));
    }
    let text = template.filled(
        global.store.as_deref(),
        arguments.interval.as_deref(),
        &arguments.command,
    );
    match &arguments.output {
        Some(path) => write(path, &text),
        None if global.json => print::print_json(&Data {
            name: template.name,
            text,
        }),
        None => print::print(&text),
    }
}

/// Returns true if a store's path has a folder above it for a volume. A volume's own folder cannot be a store, because
/// other users have access to it.
fn is_in_volume(store: &str) -> bool {
    let parent = Path::new(store).parent();
    store.starts_with('/') && parent.is_some_and(|parent| parent != Path::new("/"))
}

/// A file as data.
#[derive(Serialize)]
struct Data {
    name: &'static str,
    text: String,
}

fn write(path: &Path, text: &str) -> Result<ExitCode, Failure> {
    let written = File::create_new(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| refused(format!("cannot write {}: {error}", path.display())))?;
    print::say(&format!("wrote {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

fn refused(text: String) -> Failure {
    Failure { text, code: OURS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_the_places_that_are_filled() {
        for scheduler in Scheduler::value_variants() {
            let template = scheduler.template();
            let places = [template.store, template.interval, template.command];
            for place in places.into_iter().chain(template.volume) {
                assert!(template.text.contains(place), "{}: {place}", template.name);
            }
            let command = ["./a b".to_owned(), "--lr=1".to_owned()];
            let text = template.filled(Some("/my volume/my store"), Some("7m"), &command);
            for place in places.into_iter().chain(template.volume) {
                assert!(!text.contains(place), "{}: {place}", template.name);
            }
            for part in ["/my volume/my store", "7m", "./a b", "--lr=1"] {
                assert!(text.contains(part), "{}: {part}", template.name);
            }
            assert_eq!(template.filled(None, None, &[]), template.text);
        }
    }

    #[test]
    fn a_store_in_a_container_has_a_volume_above_it() {
        assert!(is_in_volume("/store/train") && is_in_volume("/a/b/c/"));
        for store in ["/store", "/", "store/train", ".ckpt-run", ""] {
            assert!(!is_in_volume(store), "{store}");
        }
        let text = Scheduler::Kubernetes
            .template()
            .filled(Some("/mnt/x/run1"), None, &[]);
        assert!(text.contains(r#"mountPath: "/mnt/x""#), "{text}");
    }

    #[test]
    fn words_are_quoted_as_each_file_wants_it() {
        let word = "it's 5% of \"$HOME\"";
        assert_eq!(Words::Shell.one(word), r#"'it'\''s 5% of "$HOME"'"#);
        assert_eq!(Words::Systemd.one(word), r#""it's 5%% of \"$$HOME\"""#);
        assert_eq!(Words::List.one(word), r#""it's 5% of \"$HOME\"""#);
        assert_eq!(Words::Shell.many(&["a/b", "--c=d"]), "a/b --c=d");
    }
}
