//! The event loop: it waits for messages and timers, has the machine decide, and carries out the actions.
//!
//! ```text
//! signals, clients, threads ─ Message ─▶ inbox ─ Event ─▶ decide::Machine ─ Action ─▶ Effects ─▶ threads, processes
//!                                                              └───────── Notice ─▶ Observers
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::control::server;
use super::decide::action::Action;
use super::decide::event::{Event, Now, StoreImages};
use super::decide::stage::Beginning;
use super::decide::state_machine::Machine;
use super::effects::perform::{Effects, Outcome};
use super::error::{RunError, system};
use super::hang::watchdog::HangWatch;
use super::inbox::{MESSAGES_MAX, Message, watch_signals};
use super::notice::Notice;
use super::observers::fan_out::Observers;
use super::observers::journal::host_pid;
use super::observers::keyboard;
use super::observers::run_phase::State;
use super::observers::run_status::Status;
use super::policy::schedule::Moment;
use super::preemption;
use crate::clock;
use crate::job::Key;
use crate::remote_run::RemoteRun;
use crate::restore::companions_elsewhere;
use crate::run::exit_code::LEASE_LOST;
use crate::run::format::chain;
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::run::run_state::{Progress, RunState};
use crate::run::running_job::SharedStreams;

/// Time for the last hook's message, after the hook's own time.
const MESSAGE_LIMIT: Duration = Duration::from_secs(5);
/// Time between two looks at an upload.
const UPLOAD_LOOK: Duration = Duration::from_millis(100);
/// Time for the loop to kill the job of a lost lease: half of the shortest lease's guard.
const KILL_LIMIT: Duration = Duration::from_millis(500);

/// The loop of a run. Lives on the main thread.
pub(super) struct Supervisor {
    context: Arc<RunContext>,
    machine: Machine,
    effects: Effects,
    observers: Observers,
    /// The watch for signs of a hang, if any is configured.
    watch: Option<HangWatch>,
    inbox: Receiver<Message>,
    clients: server::Asking,
    exit: Option<u8>,
}

fn moment() -> Moment {
    Moment {
        monotonic: clock::now(),
        unix_ms: clock::unix_ms(),
    }
}

fn now(context: &Arc<RunContext>) -> Now {
    let context = Arc::clone(context);
    let read = move || {
        let images = context.store.images();
        images.inspect_err(|error| tracing::warn!("cannot list the images: {}", chain(error)))
    };
    Now {
        at: moment(),
        images: StoreImages::new(read),
    }
}

fn is_lost(result: &Result<u8, RunError>) -> bool {
    matches!(result, Err(RunError::LeaseLost { .. }))
}

/// Makes the loss of a lease of the run kill the job.
fn watch_leases(context: &RunContext, inbox: &Sender<Message>) -> Result<(), RunError> {
    for lease in context.leases() {
        let (inbox, job_end) = (inbox.clone(), lease.job_end());
        let watched = lease.watch(Box::new(move |holder| {
            let inbox = inbox.clone();
            // Not in this thread: the queue may be full.
            let tell = move || inbox.blocking_send(Message::Event(Event::LeaseLost(holder)));
            let told = Builder::new().spawn(tell);
            // The loop kills the job at once. If it hangs, this process ends, and the sandbox with it.
            if told.is_err() || !job_end.comes_within(KILL_LIMIT) {
                std::process::exit(LEASE_LOST.into());
            }
        }));
        watched.map_err(|holder| RunError::LeaseLost { holder })?;
    }
    if let Some(remote) = &context.remote {
        remote.has_begun();
    }
    if let Some(lease) = &context.store_lease {
        lease.has_begun();
    }
    Ok(())
}

/// Uploads images from now on, if the run has a remote store.
fn start_uploads(context: &Arc<RunContext>, state: &RunState) -> Result<(), RunError> {
    let Some(remote) = &context.remote else {
        return Ok(());
    };
    let shared = Arc::downgrade(context);
    remote.start_uploads(
        &context.store,
        Box::new(move |id| {
            let context = shared.upgrade();
            context.map_or_else(Vec::new, |context| companions_elsewhere(&context, id))
        }),
    )?;
    let images = context.store.images()?;
    let newest = images
        .iter()
        .rfind(|image| image.damaged.is_none() && state.goes_on_from(image));
    remote.upload_backlog(newest.map(|image| image.id));
    Ok(())
}

impl Supervisor {
    /// Must be called inside the runtime.
    pub fn new(
        context: Arc<RunContext>,
        streams: SharedStreams,
        state: RunState,
    ) -> Result<Self, RunError> {
        let (sender, inbox) = channel(MESSAGES_MAX);
        watch_signals(&sender).map_err(system("watch for signals"))?;
        let clients = server::listen(context.store.path(), sender.clone())
            .map_err(system("listen on the control socket"))?;
        let random = clock::random().map_err(system("get random bytes"))?;
        let (seed, _) = random.split_first_chunk().unwrap_or((&[0; 8], &[]));
        let seed = u64::from_le_bytes(*seed);
        let observers = Observers::new(&context, &state, &streams, &sender, moment());
        let watch = HangWatch::new(&context.config.hang, &context.directory, &streams, &sender);
        watch_leases(&context, &sender)?;
        start_uploads(&context, &state)?;
        preemption::watch(&context.config.preemption, &sender);
        let machine = Machine::new(context.config.clone(), state, seed, now(&context));
        Ok(Self {
            effects: Effects::new(Arc::clone(&context), streams, sender),
            context,
            machine,
            observers,
            watch,
            inbox,
            clients,
            exit: None,
        })
    }

    pub async fn run(&mut self, beginning: Beginning) -> Result<u8, RunError> {
        let command = self.machine.state().command.shown();
        self.notify(&Notice::Opened { command });
        let mut result = self.run_to_exit(beginning).await;
        if result.is_ok() {
            // So a lease that is lost from now on does not end this process.
            self.note_job_end();
        }
        if !is_lost(&result)
            && let Some(holder) = self.next_holder().await
        {
            let holder = Some(holder);
            result = Err(RunError::LeaseLost { holder });
        }
        self.machine.close();
        self.finish_hooks().await;
        let is_lost = is_lost(&result);
        if !is_lost {
            self.finish_remote().await;
        }
        self.report_end(&result);
        if !is_lost {
            // Otherwise the socket can be the next holder's.
            server::remove(self.context.store.path());
        }
        // Clients that asked too late learn that the run has ended.
        self.inbox.close();
        while self.inbox.try_recv().is_ok() {}
        self.clients.end().await;
        if !is_lost {
            // The last: another machine can begin then.
            self.end_store_lease().await;
        }
        result
    }

    async fn run_to_exit(&mut self, beginning: Beginning) -> Result<u8, RunError> {
        self.observers.observe(&self.machine.situation(), moment());
        self.handle(Event::Begin(beginning))?;
        loop {
            self.attend();
            if let Some(code) = self.exit {
                return Ok(code);
            }
            self.step().await?;
        }
    }

    async fn step(&mut self) -> Result<(), RunError> {
        let timer = self.machine.next_timer(moment());
        if let Some((wait, timer)) = timer
            && wait.is_zero()
        {
            // A flood of messages must not delay a timer, nor a timer a message.
            self.handle(Event::Timer(timer))?;
            let message = self.inbox.try_recv();
            return message.map_or(Ok(()), |message| self.receive(message));
        }
        let look = self.next_look();
        let wait = timer.map(|(wait, _)| wait).into_iter().chain(look).min();
        match self.next_message(wait).await {
            Some(message) => self.receive(message),
            None => match timer.filter(|(due, _)| Some(*due) == wait) {
                Some((_, timer)) => self.handle(Event::Timer(timer)),
                None => Ok(()), // something to attend to
            },
        }
    }

    /// Returns the next message; `None` if none arrives within this time.
    async fn next_message(&mut self, limit: Option<Duration>) -> Option<Message> {
        match limit {
            Some(limit) => {
                let next = tokio::time::timeout(limit, self.inbox.recv());
                next.await.ok().flatten()
            }
            None => self.inbox.recv().await,
        }
    }

    /// Returns the time until [`Supervisor::attend`] has something to do.
    fn next_look(&self) -> Option<Duration> {
        let computes = self.machine.is_computing();
        let watch = self.watch.as_ref().filter(|_| computes);
        [
            watch.and_then(HangWatch::next_sample),
            self.observers.systemd.wait(),
            self.effects.keyboard.next_look(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    fn receive(&mut self, message: Message) -> Result<(), RunError> {
        let event = match message {
            Message::Event(event) => Some(event),
            Message::Sandbox(serial, news) => self.effects.sandbox_news(serial, news)?,
            Message::Typed(Key::Interrupt) => Some(Event::Interrupted),
            Message::Typed(Key::Suspend) => {
                keyboard::suspend_group();
                None
            }
            Message::Sampled(job, sample) => {
                let is_present = self.effects.job().is_some_and(|now| Arc::ptr_eq(now, &job));
                let computed = self.machine.computed(clock::now());
                let watch = self.watch.as_mut();
                let sample = sample.filter(|_| is_present);
                let suspect = watch.and_then(|watch| watch.sampled(sample, computed));
                suspect.map(Event::Suspected)
            }
            Message::StatusRequest(reply) => {
                // A client that went away needs no answer.
                drop(reply.send(Box::new(self.status())));
                None
            }
            Message::HookEnded(ended) => self.notify(&Notice::HookEnded(ended)),
        };
        event.map_or(Ok(()), |event| self.handle(event))
    }

    /// Has the machine decide about an event, and about those that its actions produce at once.
    fn handle(&mut self, event: Event) -> Result<(), RunError> {
        let ends_large_work = event.ends_large_work();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.machine.on(event, now(&self.context)) {
                events.extend(self.perform(action)?);
            }
        }
        if ends_large_work {
            machine::return_memory();
        }
        Ok(())
    }

    fn perform(&mut self, action: Action) -> Result<Option<Event>, RunError> {
        match action {
            Action::Notify(notice) => return Ok(self.notify(&notice)),
            Action::WatchAnew => {
                let computed = self.machine.computed(clock::now());
                if let Some(watch) = &mut self.watch {
                    watch.begin_anew(computed);
                }
            }
            Action::Exit(code) => self.exit = Some(code),
            Action::Fail(error) => {
                if let RunError::LeaseLost { .. } = &error {
                    self.note_job_end();
                }
                return Err(error);
            }
            action => match self.effects.perform(action, self.machine.state())? {
                Outcome::None => {}
                Outcome::Event(event) => return Ok(Some(event)),
                Outcome::Notice(notice) => return Ok(self.notify(&notice)),
            },
        }
        Ok(None)
    }

    /// Informs the observers; returns the event that they derive.
    fn notify(&mut self, notice: &Notice) -> Option<Event> {
        let run = self.machine.state().started_unix_ms;
        self.observers.notice(run, notice);
        if let (Notice::Snapshot(done), Some(remote)) = (notice, &self.context.remote) {
            remote.upload(done.id);
        }
        let is_image = matches!(notice, Notice::Snapshot(_));
        (is_image && self.observers.journal.is_new_ground()).then_some(Event::NewGround)
    }

    fn attend(&mut self) {
        let situation = self.machine.situation();
        self.effects.attend_keyboard(self.machine.may_read_keys());
        self.observers.observe(&situation, moment());
        if let Some((watch, job)) = self.watch.as_mut().zip(self.effects.job())
            && situation.computes
        {
            watch.sample_if_due(job);
        }
    }

    fn status(&self) -> Status {
        let now = moment();
        let job = self.effects.job().filter(|_| self.machine.is_running());
        Status {
            job_pid: job.and_then(|job| host_pid(&job.sandbox, job.pids)),
            remote: self.context.remote.as_ref().map(RemoteRun::progress),
            ..self.observers.status(now, self.machine.status(now))
        }
    }

    /// Waits for the hooks that were called, each within its time. A SIGTERM or SIGINT ends the wait.
    async fn finish_hooks(&mut self) {
        let each = self.context.config.hooks.timeout;
        let deadline = clock::now() + each * self.observers.hooks.running + MESSAGE_LIMIT;
        while self.observers.hooks.running > 0 {
            self.attend();
            let left = deadline.saturating_duration_since(clock::now());
            let wait = self
                .observers
                .systemd
                .wait()
                .map_or(left, |due| due.min(left));
            match self.next_message(Some(wait)).await {
                Some(Message::HookEnded(ended)) => {
                    self.notify(&Notice::HookEnded(ended));
                }
                None if wait < left => {}
                Some(message) if !self.ends_wait(&message) => {}
                _ => {
                    tracing::warn!(
                        "not waiting for hooks any longer: running hooks continue, waiting hooks are not run"
                    );
                    return;
                }
            }
        }
    }

    /// Returns true for a signal that ends the waits after the job's end.
    fn ends_wait(&mut self, message: &Message) -> bool {
        match message {
            Message::Event(Event::Signal(Signal::SIGTERM)) => !self.machine.is_announced_shutdown(),
            Message::Event(Event::Signal(signal)) => {
                matches!(signal, Signal::SIGINT | Signal::SIGQUIT | Signal::SIGHUP)
            }
            _ => false,
        }
    }

    /// Waits for the upload of the newest image, and ends the lease of the remote run. A SIGTERM or SIGINT, or the end of
    /// the grace period, ends the wait.
    async fn finish_remote(&mut self) {
        let context = Arc::clone(&self.context);
        let Some(remote) = &context.remote else {
            return;
        };
        let progress = self.machine.state().progress;
        if progress != Progress::Finished && remote.is_behind() {
            tracing::info!("waiting for the upload of the newest image");
            self.wait_for_uploads(remote).await;
        }
        // A request, which blocks: nothing else is to be done.
        let ended = tokio::task::spawn_blocking(move || {
            if let Some(remote) = &context.remote {
                remote.end(progress == Progress::Finished);
            }
        });
        let _ = ended.await;
    }

    fn note_job_end(&self) {
        for lease in self.context.leases() {
            lease.job_end().note();
        }
    }

    /// Returns the machine that has taken the lease of a shared store meanwhile.
    async fn next_holder(&self) -> Option<String> {
        self.context.store_lease.as_ref()?;
        let context = Arc::clone(&self.context);
        let holder = tokio::task::spawn_blocking(move || {
            let lease = context.store_lease.as_ref()?;
            lease.next_holder()
        });
        holder.await.ok().flatten()
    }

    async fn end_store_lease(&self) {
        if self.context.store_lease.is_none() {
            return;
        }
        let context = Arc::clone(&self.context);
        let ended = tokio::task::spawn_blocking(move || {
            if let Some(lease) = &context.store_lease {
                lease.end();
            }
        });
        let _ = ended.await;
    }

    async fn wait_for_uploads(&mut self, remote: &RemoteRun) {
        let deadline = self.machine.stop_deadline();
        while remote.is_behind() {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(clock::now()));
            let wait = left.map_or(UPLOAD_LOOK, |left| left.min(UPLOAD_LOOK));
            let message = self.next_message(Some(wait)).await;
            let ends = message.is_some_and(|message| {
                matches!(message, Message::Event(Event::LeaseLost(_))) || self.ends_wait(&message)
            });
            if ends || left.is_some_and(|left| left.is_zero()) {
                tracing::warn!(
                    "not waiting for the upload any longer: the newest image is only in the store here"
                );
                return;
            }
        }
    }

    /// Reports the end of the run to the observers, and to the user in a sentence.
    fn report_end(&mut self, result: &Result<u8, RunError>) {
        let (state, code) = match result {
            Err(error) => (State::Error, error.exit_code()),
            Ok(code) => (State::at_end(self.machine.state().progress), *code),
        };
        let how = state.as_str();
        self.notify(&Notice::Ended { how, code });
        let status = Status {
            state,
            exit_code: Some(code),
            work_at_risk_seconds: None,
            next_snapshot: None,
            ..self.status().measured()
        };
        self.observers.metrics.end(&status);
        if result.is_ok() {
            let summary = self.observers.journal.account.summary_then();
            tracing::info!("{}", summary.in_words());
        }
    }

    /// Sets the run back to its state `before`, if the chosen image was not restored.
    pub fn leave_as_it_was(&self, before: Option<&RunState>) {
        let Some(before) = before.filter(|_| self.machine.has_chosen_image()) else {
            return;
        };
        if let Err(error) = before.save(self.context.store.path()) {
            tracing::warn!(
                "cannot revert run.json: the run will continue from the chosen image: {}",
                chain(&error)
            );
        }
    }
}
