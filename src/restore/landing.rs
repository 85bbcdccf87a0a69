//! The moment when CRIU has restored all tasks and none of them runs: they get the attributes that CRIU does not restore,
//! and what they have open is compared with what was there, where another user can change what the paths of the image lead
//! to while CRIU opens them as root.

use std::os::fd::AsFd;
use std::path::Path;

use super::error::RestoreError;
use crate::clock;
use crate::criu::{PluginVariable, Question, plugin_follows_no_links};
use crate::job::{self, Expected};
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::RunContext;
use crate::sandbox::{Isolation, Sandbox};

/// What is to be done then.
pub(super) struct Landing<'a> {
    sandbox: &'a Sandbox,
    facts: &'a ImageFacts,
    /// What CRIU is to find; `None` if nobody can lead it elsewhere.
    expected: Option<Expected>,
    question: Question,
}

impl<'a> Landing<'a> {
    /// Notes what CRIU is to find. `folder` is for the socket.
    ///
    /// # Errors
    /// Somebody leads it elsewhere already.
    pub fn prepare(
        context: &RunContext,
        sandbox: &'a Sandbox,
        facts: &'a ImageFacts,
        folder: &Path,
    ) -> Result<Self, RestoreError> {
        let ours = context.files.ours();
        Ok(Self {
            sandbox,
            facts,
            expected: Expected::note(&facts.users, &facts.files, &facts.nodes, ours)?,
            question: Question::bind(folder).map_err(RestoreError::Prepare)?,
        })
    }

    /// Returns the variables by which CRIU's plugin follows no links and asks before the tasks run.
    pub fn environment(&self) -> Result<Vec<PluginVariable>, RestoreError> {
        let mut variables = vec![self.question.variable()];
        // Without a namespace of its own, the machine's mounts would change.
        let is_own = self.sandbox.isolation() == Isolation::Namespaces;
        let needs_no_links = self.expected.as_ref().is_some_and(Expected::needs_no_links);
        if is_own && needs_no_links {
            let protected = plugin_follows_no_links(self.sandbox.pid());
            variables.extend(protected.map_err(RestoreError::Prepare)?);
        }
        Ok(variables)
    }

    /// Waits for the plugin, and completes and compares the tasks. Kills them if what they have is something else. Returns
    /// `None` if `cancel` ended before the plugin asked.
    pub fn wait(&self, cancel: &impl AsFd) -> Option<Result<(), RestoreError>> {
        self.question.wait(cancel, || {
            let completed = self.complete();
            completed.inspect_err(|_| self.sandbox.kill())
        })
    }

    fn complete(&self) -> Result<(), RestoreError> {
        let root = job::child_with_pid(self.sandbox.pid(), self.facts.pids.root)?;
        let processes = job::tree(root)?;
        if let Some(expected) = &self.expected {
            let begun = clock::now();
            expected.check(&processes)?;
            tracing::debug!(took = ?(clock::now() - begun), "compared what the tasks have open");
        }
        for lost in job::give_back_attributes(&self.facts.attributes, &processes) {
            tracing::warn!("not as at the snapshot: {lost}");
        }
        Ok(())
    }
}
