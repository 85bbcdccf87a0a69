//! Simulation of the parties and of the storage, step by step, with its checks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::party::{Append, Fate, Intent, Machine, Reply, Request, Role};
use crate::remote_run::lease::{Held, Watched};
use crate::remote_run::shared_state::{Change, Holder, State};
use crate::store::{ImageId, RemoteImage};

const TTL: Duration = Duration::from_secs(10);
/// End of the faults, and of the model, in milliseconds.
const FAULTS_MS: u64 = 200_000;
const END_MS: u64 = 300_000;
/// Longest suspension.
const SUSPENSION_MS: u64 = 60_000;

struct Model {
    log: Vec<State>,
    machines: Vec<Machine>,
    fate: Fate,
    now: u64,
    /// The images as the accepted entries have made them, and which are pinned.
    images: BTreeMap<String, bool>,
    /// Lowest series of objects that are not removed by the accepted entries of `prune`.
    series: u64,
    reached: Reached,
}

/// Events in a model so far.
#[derive(Debug, Default)]
struct Reached {
    takeovers: usize,
    /// Images whose commit was answered.
    commits: BTreeSet<String>,
    /// Images whose pin was answered.
    pins: BTreeSet<String>,
    forgotten: usize,
    prunes: usize,
    /// Entries of holders that came second to one of a verb.
    repeated: usize,
}

impl Model {
    fn new(choices: Vec<u32>) -> Self {
        let mut fate = Fate {
            choices: choices.into_iter(),
        };
        let machines = (0..5).map(|number| Machine {
            name: format!("m{number}"),
            // Up to 5 % slow or fast.
            rate: 950 + fate.below(101),
            offset: fate.below(1_000_000),
            role: if number < 3 {
                Role::Waits(None)
            } else {
                Role::Verb
            },
            known: None,
            epoch: 0,
            request: None,
            reply: None,
            suspended: 0,
            next: fate.below(30_000),
            commits: 0,
        });
        Self {
            machines: machines.collect(),
            log: Vec::new(),
            fate,
            now: 0,
            images: BTreeMap::new(),
            series: 0,
            reached: Reached::default(),
        }
    }

    fn run(&mut self) {
        while self.now < END_MS {
            for machine in 0..self.machines.len() {
                self.server(machine);
                if self.now >= self.machines[machine].suspended {
                    self.step(machine);
                }
            }
            self.check();
            self.now += 50;
        }
    }

    fn check(&self) {
        let computing = self
            .machines
            .iter()
            .filter(|machine| machine.computes(self.now));
        let names: Vec<_> = computing.map(|machine| &machine.name).collect();
        assert!(names.len() <= 1, "{names:?} run the job at {} ms", self.now);
        for object in &self.reached.pins {
            assert_eq!(self.images.get(object), Some(&true), "{object} is lost");
        }
    }

    /// Makes the change of an accepted entry, and compares the entry with it.
    fn accept(&mut self, append: &Append) {
        let state = &append.state;
        match &append.intent {
            Intent::Lease | Intent::Release => {}
            Intent::Commit { object, old } => {
                let old = old
                    .as_ref()
                    .filter(|old| self.images.get(*old) == Some(&false));
                if let Some(old) = old {
                    self.images.remove(old);
                }
                self.images.insert(object.clone(), false);
            }
            Intent::Pin(object) => {
                self.images.insert(object.clone(), true);
            }
            Intent::Forget(object) => {
                self.images.remove(object);
            }
            Intent::Prune => self.series = state.series,
        }
        let images = state.images.iter();
        let images = images.map(|image| (image.object.clone(), image.pinned.is_some()));
        assert_eq!(
            images.collect::<BTreeMap<_, _>>(),
            self.images,
            "{append:?}"
        );
        assert!(state.series >= self.series, "{append:?} can lose objects");
    }

    /// Lets the store answer a request that has arrived.
    fn server(&mut self, number: usize) {
        let request = &mut self.machines[number].request;
        let Some((_, request)) = request.take_if(|(at, _)| *at <= self.now) else {
            return;
        };
        let reply = match request.clone() {
            Request::Look => {
                let newest = self.log.last();
                Reply::Newest(newest.map(|state| (self.log.len() - 1, state.clone())))
            }
            Request::Append(append) => {
                if append.serial == self.log.len() {
                    self.log.push(append.state.clone());
                    self.accept(&append);
                }
                let is_ours = self.log.get(append.serial) == Some(&append.state);
                Reply::Appended(append, is_ours)
            }
        };
        let is_lost = self.now < FAULTS_MS && self.fate.below(10) == 1;
        let reply = if is_lost { Reply::Lost(request) } else { reply };
        let delay = if self.now < FAULTS_MS {
            self.fate.delay()
        } else {
            10
        };
        self.machines[number].reply = Some((self.now + delay, reply));
    }

    fn send(&mut self, number: usize, request: Request) {
        let delay = if self.now < FAULTS_MS {
            self.fate.delay()
        } else {
            10
        };
        self.machines[number].request = Some((self.now + delay, request));
    }

    fn step(&mut self, number: usize) {
        let now = self.now;
        let machine = &mut self.machines[number];
        let clock = machine.clock(now);
        if let Role::Holds(held) = &machine.role
            && !held.is_valid(clock)
        {
            self.stop(number);
            return;
        }
        if let Some((_, reply)) = machine.reply.take_if(|(at, _)| *at <= now) {
            self.receive(number, reply);
            return;
        }
        if !machine.is_idle() || now < machine.next {
            return;
        }
        if now < FAULTS_MS && self.fate.below(40) == 1 {
            let machine = &mut self.machines[number];
            machine.suspended = now + self.fate.below(SUSPENSION_MS);
            return;
        }
        match &self.machines[number].role {
            Role::Stopped => self.machines[number].role = Role::Waits(None),
            Role::Waits(_) => self.wait(number, clock),
            Role::Holds(held) => {
                if clock >= held.next_renewal() {
                    self.change(number, clock);
                }
            }
            Role::Verb => {
                if now < FAULTS_MS {
                    self.machines[number].next = now + self.fate.below(2000);
                    self.send(number, Request::Look);
                }
            }
        }
    }

    /// Ends the job of a machine that has lost its lease.
    fn stop(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        machine.role = Role::Stopped;
        machine.reply = None;
        // What it has sent may still arrive.
        if machine.request.is_none() {
            machine.known = None;
        }
        machine.next = self.now + 1000;
    }

    /// Looks at the lease, or takes it if it is free.
    fn wait(&mut self, number: usize, clock: Duration) {
        let machine = &mut self.machines[number];
        let holder = Holder {
            store: machine.name.clone(),
            host: machine.name.clone(),
        };
        let ttl_ms = u64::try_from(TTL.as_millis()).unwrap();
        let next = match (&machine.known, &machine.role) {
            (Some((serial, state)), Role::Waits(Some(watched)))
                if state.released || clock >= watched.free_at() =>
            {
                Some((serial + 1, state.taken_by(holder, ttl_ms)))
            }
            (None, Role::Waits(Some(_))) => Some((0, State::first(holder, ttl_ms))),
            _ => None,
        };
        machine.next = self.now + 1000;
        let request = next.map_or(Request::Look, |(serial, state)| {
            Request::Append(self.append(serial, state, Intent::Lease, clock))
        });
        self.send(number, request);
    }

    fn append(&self, serial: usize, mut state: State, intent: Intent, begun: Duration) -> Append {
        // As random as the nonce of the log: no two entries are the same.
        state.nonce = self.now * 8 + u64::try_from(serial).unwrap() * 10_000_000_000;
        state.nonce += u64::try_from(begun.as_nanos() % 7).unwrap();
        state.nonce = state.nonce.wrapping_mul(31) + state.holder.store.len() as u64;
        Append {
            serial,
            state,
            intent,
            begun,
        }
    }

    /// Lets the holder append an entry.
    fn change(&mut self, number: usize, clock: Duration) {
        let choice = self.fate.below(8);
        let machine = &mut self.machines[number];
        let Some((serial, state)) = machine.known.clone() else {
            return;
        };
        let oldest = state.images.first().map(|image| image.object.clone());
        let (intent, change) = match (choice, oldest) {
            (1..=4, oldest) => {
                let old = oldest.filter(|_| choice == 4);
                machine.commits += 1;
                let object = format!("{}-{}-{}", machine.name, machine.epoch, machine.commits);
                let image = RemoteImage {
                    object: object.clone(),
                    id: ImageId::FIRST,
                    created_unix_ms: 0,
                    raw_bytes: 0,
                    pinned: None,
                    abandoned: false,
                };
                let change = Change::Commit {
                    image,
                    old: old.iter().cloned().collect(),
                };
                (Intent::Commit { object, old }, change)
            }
            (5, _) if self.now < FAULTS_MS => {
                (Intent::Release, Change::Release { finished: false })
            }
            _ => (Intent::Lease, Change::Renew),
        };
        match state.changed(machine.epoch, &change) {
            Ok(state) => {
                let append = self.append(serial + 1, state, intent.clone(), clock);
                self.send(number, Request::Append(append));
                // Its job has ended before.
                if intent == Intent::Release {
                    self.stop(number);
                }
            }
            Err(_) => self.stop(number),
        }
    }

    /// Lets a verb append an entry after the newest one.
    fn edit(&mut self, number: usize, serial: usize, state: &State) {
        let mut images = state.images.clone();
        let last = images.len().saturating_sub(1);
        // One of the newest, so that not all of them are pinned.
        let at = last.saturating_sub(usize::try_from(self.fate.below(4)).unwrap());
        let (intent, next) = match images.get_mut(at) {
            _ if state.released && self.fate.below(2) == 1 => {
                (Intent::Prune, state.before_removal())
            }
            Some(image) if self.fate.below(3) == 1 => {
                image.pinned = Some(String::new());
                let intent = Intent::Pin(image.object.clone());
                (intent, state.edited(images))
            }
            Some(image) if image.pinned.is_none() && at < last => {
                let intent = Intent::Forget(image.object.clone());
                images.remove(at);
                (intent, state.edited(images))
            }
            Some(_) | None => return,
        };
        let clock = self.machines[number].clock(self.now);
        let append = self.append(serial + 1, next, intent, clock);
        self.send(number, Request::Append(append));
    }

    fn receive(&mut self, number: usize, reply: Reply) {
        let now = self.now;
        let machine = &mut self.machines[number];
        let clock = machine.clock(now);
        match (reply, &mut machine.role) {
            (Reply::Lost(request), _) => self.send(number, request),
            (Reply::Newest(newest), Role::Waits(watched)) => {
                let renewals = newest.as_ref().map_or(0, |(_, state)| state.renewals);
                machine.known = newest;
                watched
                    .get_or_insert(Watched::new(renewals, TTL, clock))
                    .see(renewals, TTL, clock);
            }
            (Reply::Newest(newest), Role::Holds(_)) => {
                let is_same = |(_, state): &(usize, State)| state.epoch == machine.epoch;
                self.reached.repeated += usize::from(newest.as_ref().is_some_and(is_same));
                machine.known = newest;
            }
            (Reply::Newest(newest), Role::Verb) => {
                if let Some((serial, state)) = newest {
                    self.edit(number, serial, &state);
                }
            }
            (Reply::Appended(append, true), Role::Waits(_)) => {
                machine.epoch = append.state.epoch;
                machine.role = Role::Holds(Held::new(TTL, append.begun));
                machine.known = Some((append.serial, append.state));
                self.reached.takeovers += 1;
            }
            (Reply::Appended(append, true), Role::Holds(held)) => {
                held.renewed(append.begun);
                machine.known = Some((append.serial, append.state));
                if let Intent::Commit { object, .. } = append.intent {
                    self.reached.commits.insert(object);
                }
            }
            (Reply::Appended(append, true), Role::Verb) => match append.intent {
                Intent::Pin(object) => {
                    self.reached.pins.insert(object);
                }
                Intent::Forget(_) => self.reached.forgotten += 1,
                _ => self.reached.prunes += 1,
            },
            (Reply::Appended(_, false), Role::Waits(watched)) => *watched = None,
            (Reply::Appended(_, false), Role::Holds(_) | Role::Verb) => {
                self.send(number, Request::Look);
            }
            (Reply::Newest(_) | Reply::Appended(..), Role::Stopped) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn one_machine_at_a_time_runs_the_job(choices in prop::collection::vec(any::<u32>(), 0..8000)) {
        let mut model = Model::new(choices);
        model.run();
        // After the faults, one of them holds the lease.
        let computing = model.machines.iter().filter(|machine| machine.computes(END_MS)).count();
        prop_assert_eq!(computing, 1);
    }
}

/// The model reaches what it checks.
#[test]
fn the_model_has_takeovers_commits_and_verbs() {
    let choices =
        |seed: u32| (0..12_000_u32).map(move |n| (n ^ seed).wrapping_mul(2_654_435_761) >> 7);
    let models = (0..80).map(|seed| {
        let mut model = Model::new(choices(seed).collect());
        model.run();
        model
    });
    let all = models
        .map(|model| model.reached)
        .fold(Reached::default(), |mut all, one| {
            all.takeovers += one.takeovers;
            all.commits.extend(one.commits);
            all.pins.extend(one.pins);
            all.forgotten += one.forgotten;
            all.prunes += one.prunes;
            all.repeated += one.repeated;
            all
        });
    assert!(all.takeovers > 40 && all.commits.len() > 40, "{all:?}");
    assert!(all.pins.len() > 20 && all.forgotten > 5, "{all:?}");
    assert!(all.prunes > 5 && all.repeated > 10, "{all:?}");
}

/// The model notices an entry that undoes the change of another one.
#[test]
fn the_model_sees_a_lost_pin() {
    let mut model = Model::new(Vec::new());
    let holder = Holder {
        store: "m0".to_owned(),
        host: "m0".to_owned(),
    };
    let before = State::first(holder, 10_000);
    model.images.insert("pinned".to_owned(), true);
    let stale = before.changed(1, &Change::Renew).unwrap();
    let append = model.append(1, stale, Intent::Lease, Duration::ZERO);
    let accept = std::panic::AssertUnwindSafe(|| model.accept(&append));
    assert!(std::panic::catch_unwind(accept).is_err());
}

/// The model notices a lease that is taken too early.
#[test]
fn the_model_sees_two_jobs() {
    let mut model = Model::new(Vec::new());
    model.now = 1000;
    let held = Held::new(TTL, model.machines[0].clock(1000));
    for machine in &mut model.machines[..2] {
        machine.role = Role::Holds(held);
    }
    assert!(std::panic::catch_unwind(|| model.check()).is_err());
}
