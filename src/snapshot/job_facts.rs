//! The facts that an image records about a job beyond CRIU's: sizes and contents of files, positions of the standard
//! streams, sockets, timers. They are recorded while the tasks are frozen.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::Duration;

use super::error::SnapshotError;
use super::take_snapshot::Subject;
use crate::job::{self, Access, Node, OpenFile, Process};
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::ImageFacts;
use crate::run::machine;
use crate::run::streams::Marks;
use crate::sandbox::Isolation;
use crate::store::StreamWriter;

/// The recorded facts.
pub(crate) struct Recorded {
    processes: Vec<Process>,
    accounts: Vec<job::ProcessAccount>,
    files: Vec<OpenFile>,
    nodes: Vec<Node>,
    sockets: job::Sockets,
    timers: Vec<job::Timer>,
    streams: Marks,
}

impl Recorded {
    /// Records all facts. The contents of files up to `bytes_max` go into streams that `open` opens; the standard
    /// streams are marked last.
    pub fn take(
        processes: Vec<Process>,
        bytes_max: u64,
        mark: impl FnOnce() -> io::Result<Marks>,
        open: impl Fn(&str) -> Result<StreamWriter, SnapshotError>,
    ) -> Result<Self, SnapshotError> {
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let mut files = job::collect(&pids)?;
        let sockets = job::Sockets::record(&pids)?;
        let timers = job::rung_timers(&processes)?;
        for (index, file) in files
            .iter_mut()
            .filter(|file| file.wants_content(bytes_max))
            .enumerate()
        {
            let name = format!("files/{index}");
            let content = |source| SnapshotError::Content {
                path: file.path.display().to_string(),
                source,
            };
            let source = match File::open(&file.path) {
                Ok(source) => source,
                // The job only writes the file, perhaps as a user who may not read it.
                Err(error)
                    if error.kind() == io::ErrorKind::PermissionDenied
                        && file.access == Access::Write =>
                {
                    continue;
                }
                Err(error) => return Err(content(error)),
            };
            let mut stream = open(&name)?;
            stream.copy_from(&mut source.take(file.size))?;
            stream.finish()?;
            file.content = Some(name);
        }
        job::sample_appended(&mut files);
        Ok(Self {
            accounts: job::account(&processes),
            processes,
            nodes: job::needed(&pids, &files),
            files,
            sockets,
            timers,
            streams: mark().map_err(SnapshotError::Prepare)?,
        })
    }

    /// Returns the open files that the job writes.
    pub fn written(&self) -> HashSet<&Path> {
        let written = self.files.iter().filter(|file| file.written());
        written.map(|file| file.path.as_path()).collect()
    }

    /// Returns the image's facts: the recorded facts and the job's identity, with its CUDA processes, which `cuda`
    /// lists by host pid.
    pub fn into_facts(
        self,
        Subject {
            context,
            job,
            state,
            trigger,
            ..
        }: Subject<'_>,
        cuda: Option<(Vec<i32>, CudaFacts)>,
        freeze: Duration,
    ) -> ImageFacts {
        let cuda = cuda.map(|(host_pids, facts)| CudaFacts {
            pids: self
                .processes
                .iter()
                .filter(|process| host_pids.contains(&process.host_pid))
                .map(|process| process.pid)
                .collect(),
            moved: job.moved.clone(),
            ..facts
        });
        ImageFacts {
            trigger,
            token: job.token,
            command: context
                .command
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect(),
            directory: context.directory.clone(),
            host: machine::host_name(),
            kernel: machine::kernel_release(),
            criu: context.criu.version.to_string(),
            run: state.started_unix_ms,
            instance: context.instance.clone(),
            freeze_seconds: freeze.as_secs_f64(),
            phases: Vec::new(),
            processes: self.processes.len(),
            process_tree: self.accounts,
            pids: job.pids,
            isolated: job.sandbox.isolation() == Isolation::Namespaces,
            cuda,
            streams: self.streams,
            files: self.files,
            kept: None,
            nodes: self.nodes,
            sockets: self.sockets,
            timers: self.timers,
        }
    }
}
