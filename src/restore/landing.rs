//! Completion and check of restored tasks before they run.
//!
//! When CRIU has restored all tasks, they get the attributes that CRIU does not restore. Their open files are compared
//! with the expected ones if another user can replace files at the image's paths while CRIU opens them as root. CUDA
//! processes must have the signal that stops them until their GPU memory is back.

use std::os::fd::AsFd;
use std::path::Path;

use super::criu_restore::Failure;
use super::error::RestoreError;
use crate::clock;
use crate::criu::{OmittedState, PluginVariable, Question, plugin_follows_no_links};
use crate::job::{self, Expected, RewindError};
use crate::run::gpu_facts::SparedThreads;
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::RunContext;
use crate::sandbox::Sandbox;
use crate::sync::OnPanic;

/// Work before the restored tasks run.
pub(super) struct Landing<'a> {
    sandbox: &'a Sandbox,
    facts: &'a ImageFacts,
    /// State that the plugin gives back, if there is any.
    omitted: Option<&'a OmittedState>,
    /// Files that CRIU should open; `None` if no other user can replace them.
    expected: Option<Expected>,
    question: Question,
}

impl<'a> Landing<'a> {
    /// Records the files that CRIU should open. `folder` is for the socket.
    ///
    /// # Errors
    /// A path already leads to a file of another user.
    pub fn prepare(
        context: &RunContext,
        sandbox: &'a Sandbox,
        facts: &'a ImageFacts,
        omitted: Option<&'a OmittedState>,
        folder: &Path,
    ) -> Result<Self, RestoreError> {
        let ours = context.files.ours();
        Ok(Self {
            sandbox,
            facts,
            omitted,
            expected: Expected::note(&facts.users, &facts.files, &facts.nodes, ours)?,
            question: Question::bind(folder).map_err(RestoreError::Prepare)?,
        })
    }

    /// Returns the variables that make CRIU's plugin refuse links and ask before the tasks run.
    pub fn environment(&self) -> Result<Vec<PluginVariable>, RestoreError> {
        let mut variables = vec![self.question.variable()];
        // Without a namespace of its own, the machine's mounts would change.
        let is_own = self.sandbox.isolation().has_namespaces();
        let needs_no_links = self.expected.as_ref().is_some_and(Expected::needs_no_links);
        if is_own && needs_no_links {
            let protected = plugin_follows_no_links(self.sandbox.pid());
            variables.extend(protected.map_err(RestoreError::Prepare)?);
        }
        Ok(variables)
    }

    /// Waits for the plugin, then completes and checks the tasks. Kills them if the image was not passed to CRIU completely
    /// or they have unexpected files open. Returns `None` if `cancel` ended before the plugin asked.
    pub fn wait(&self, sending: &Failure, cancel: &impl AsFd) -> Option<Result<(), RestoreError>> {
        self.question.wait(cancel, || {
            let _guard = OnPanic(|| self.sandbox.kill());
            let completed = sending.take().map_or_else(|| self.complete(), Err);
            completed.inspect_err(|_| self.sandbox.kill())
        })
    }

    fn complete(&self) -> Result<(), RestoreError> {
        if !self.omitted.is_none_or(OmittedState::is_given_back) {
            return Err(RestoreError::Omitted);
        }
        let root = job::child_with_pid(self.sandbox.pid(), self.facts.pids.root)?;
        let processes = job::tree(root)?;
        if let Some(expected) = &self.expected {
            let begun = clock::now();
            expected.check(&processes)?;
            tracing::debug!(took = ?(clock::now() - begun), "checked the open files of the tasks");
        }
        job::name_sockets(&self.facts.moved_sockets, &self.facts.job_users())
            .map_err(RewindError::from)?;
        let attributes = job::give_back_attributes(&self.facts.attributes, &processes);
        let options = job::give_back_socket_options(&self.facts.socket_options, &processes);
        let terminals = job::hang_up_terminals(&self.facts.hung_up, &processes);
        job::disarm_timers(&self.facts.timers, &processes)?;
        let sockets = &self.facts.sockets;
        if sockets.closed && !sockets.connections.is_empty() {
            // Each connection has two ends.
            let connections = sockets.connections.len().div_ceil(2);
            tracing::warn!(
                connections,
                "connections within the job are closed, because it uses the machine's network; with a network of its own \
                 they are restored (network.namespace; without root this needs pasta)"
            );
        }
        for lost in attributes.into_iter().chain(options).chain(terminals) {
            tracing::warn!("the job differs from the snapshot: {lost}");
        }
        let stopped = self.facts.cuda.iter().flat_map(|cuda| &cuda.standing);
        for &SparedThreads { pid, .. } in stopped {
            let process = processes.iter().find(|process| process.pid == pid);
            if process.is_some_and(|process| !job::is_to_stop(process.host_pid)) {
                return Err(RestoreError::TooEarly { pid });
            }
        }
        Ok(())
    }
}
