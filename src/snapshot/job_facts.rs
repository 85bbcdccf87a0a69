//! The facts that an image records about a job beyond CRIU's: sizes and contents of files, positions of the standard
//! streams, sockets, timers. They are recorded while the tasks are frozen.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use super::error::SnapshotError;
use super::take_snapshot::Subject;
use crate::files::{OpenUse, OpenUses};
use crate::job::{self, AppendedFile, Descriptors, MappedLock, Needed, OpenFile, Process};
use crate::run::cpu_facts::CpuFacts;
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::ImageFacts;
use crate::run::machine;
use crate::run::streams::Marks;
use crate::sandbox::{Clocks, Hidden};

/// Facts about the processes' open files and descriptors. Recording them takes time, which CRIU needs as well.
pub(crate) struct Opened {
    descriptors: Vec<Descriptors>,
    files: Vec<OpenFile>,
    needed: Needed,
    appended: Vec<AppendedFile>,
    locks: Vec<MappedLock>,
}

impl Opened {
    /// Records the open files and descriptors of frozen processes.
    pub fn record(descriptors: Vec<Descriptors>) -> Result<Self, SnapshotError> {
        let mut files = job::collect(&descriptors)?;
        Ok(Self {
            appended: job::sample_appended(&mut files),
            locks: job::mapped_locks(&descriptors),
            needed: job::needed(&descriptors, &files),
            descriptors,
            files,
        })
    }

    /// Hands over the files that the job only appends to.
    pub fn take_appended(&mut self) -> Vec<AppendedFile> {
        std::mem::take(&mut self.appended)
    }

    /// Returns the files that the job has open for writing.
    pub fn written(&self) -> OpenUses<'_> {
        let written = self.files.iter().filter(|file| file.written());
        let uses = written.map(|file| {
            let open = OpenUse {
                appends: file.is_appended() && !file.in_memory,
                is_mapped: file.is_mapped || file.in_memory,
            };
            (file.path.as_path(), open)
        });
        uses.collect()
    }
}

/// The recorded facts.
pub(crate) struct Recorded {
    processes: Vec<Process>,
    accounts: Vec<job::ProcessAccount>,
    opened: Opened,
    users: Vec<u32>,
    groups: BTreeMap<u32, Vec<u32>>,
    sockets: job::Sockets,
    socket_options: Vec<job::SocketOptions>,
    timers: Vec<job::Timer>,
    hung_up: Vec<job::HungUp>,
    huge_pages: bool,
    clocks: Option<Clocks>,
    attributes: Vec<job::ThreadAttributes>,
    exit_codes: Vec<job::ExitCode>,
    streams: Marks,
}

impl Recorded {
    /// Records all other facts; the standard streams are marked last. `sockets` were recorded when the tasks had just
    /// been frozen.
    pub fn take(
        processes: Vec<Process>,
        opened: Opened,
        sockets: job::Sockets,
        mark: impl FnOnce() -> io::Result<Marks>,
    ) -> Result<Self, SnapshotError> {
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        Ok(Self {
            accounts: job::account(&processes),
            huge_pages: job::have_huge_pages(&processes),
            clocks: processes
                .first()
                .and_then(|root| Clocks::of(root.host_pid).ok()),
            attributes: job::record_attributes(&processes),
            exit_codes: job::exit_codes(&processes),
            processes,
            users: job::users(&pids),
            groups: job::groups(&pids),
            // A timer may expire while the job is frozen, after CRIU has read it.
            timers: job::record_timers(&opened.descriptors),
            hung_up: job::hung_up_terminals(&opened.descriptors),
            socket_options: job::record_socket_options(&opened.descriptors),
            opened,
            sockets,
            streams: mark().map_err(SnapshotError::Prepare)?,
        })
    }

    /// Returns the record locks that CRIU does not restore.
    pub fn locks(&self) -> &[MappedLock] {
        &self.opened.locks
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
        context.users.add(&self.users, &self.groups);
        let (users, groups) = context.users.all();
        let mut processes = self.processes.iter();
        let root = processes.find(|process| process.pid == job.pids.root);
        let filters = root.and_then(|root| job.sandbox.inherited_filters(root.host_pid));
        let isolation = job.sandbox.isolation();
        ImageFacts {
            trigger,
            token: job.token,
            command: context.command.clone().into(),
            directory: context.directory.clone(),
            host: machine::host_name(),
            kernel: machine::kernel_release(),
            criu: context.criu.version.to_string(),
            cpu: Some(CpuFacts::of_this_machine().clone()),
            run: state.started_unix_ms,
            instance: context.instance.clone(),
            freeze_seconds: freeze.as_secs_f64(),
            phases: Vec::new(),
            writing: None,
            processes: self.processes.len(),
            process_tree: self.accounts,
            pids: job.pids,
            isolated: isolation.has_namespaces(),
            namespace_of: isolation.is_user().then(|| nix::unistd::geteuid().as_raw()),
            own_network: isolation.has_network(),
            clocks: self.clocks,
            hidden: match filters {
                None | Some(0) => Hidden::NOTHING,
                Some(_) => job.sandbox.hidden_or_all(),
            },
            cuda,
            streams: self.streams,
            files: self.opened.files,
            kept_open: BTreeSet::new(),
            huge_pages: self.huge_pages,
            kept: None,
            nodes: self.opened.needed.nodes,
            moved_sockets: self.opened.needed.moved_sockets,
            users,
            groups,
            sockets: self.sockets,
            socket_options: self.socket_options,
            timers: self.timers,
            hung_up: self.hung_up,
            attributes: self.attributes,
            exit_codes: self.exit_codes,
        }
    }
}
