//! A model of several supervisors with one run: drifting clocks, slow and lost replies, suspended machines. It uses the
//! rules of `lease` and `shared_state`, and checks that never two of them run the job, and that no committed image is lost.

use std::time::Duration;

use proptest::prelude::*;

use super::lease::{Held, Watched};
use super::shared_state::{Change, Holder, State};
use crate::store::RemoteImage;

const TTL: Duration = Duration::from_secs(10);
/// End of the faults, and of the model, in milliseconds.
const FAULTS_MS: u64 = 200_000;
const END_MS: u64 = 300_000;
/// Longest delay of a request or a reply, and of a suspension.
const DELAY_MS: u64 = 15_000;
const SUSPENSION_MS: u64 = 60_000;

/// Source of decisions; after its end nothing goes wrong.
struct Fate {
    choices: std::vec::IntoIter<u32>,
}

impl Fate {
    fn below(&mut self, limit: u64) -> u64 {
        self.choices
            .next()
            .map_or(0, |choice| u64::from(choice) % limit)
    }

    /// Returns a delay that is mostly short.
    fn delay(&mut self) -> u64 {
        match self.below(8) {
            0 => self.below(DELAY_MS),
            _ => self.below(200),
        }
    }
}

#[derive(Clone, Debug)]
struct Append {
    /// Number of the entry to be created.
    serial: usize,
    state: State,
    /// Time of the first attempt, on the machine's clock.
    begun: Duration,
}

#[derive(Clone, Debug)]
enum Request {
    Look,
    Append(Append),
}

#[derive(Clone, Debug)]
enum Reply {
    /// The newest entry, and its number.
    Newest(Option<(usize, State)>),
    Appended(Append, bool),
    /// The reply was lost: the request is repeated.
    Lost(Request),
}

enum Role {
    Waits(Option<Watched>),
    /// Runs the job, until the lease ends or is lost.
    Holds(Held),
    /// Lost the lease: starts again later.
    Stopped,
}

struct Machine {
    name: String,
    /// Rate of its clock, in thousandths, and its time at the beginning.
    rate: u64,
    offset: u64,
    role: Role,
    known: Option<(usize, State)>,
    epoch: u64,
    /// Request on its way: the time of its arrival.
    request: Option<(u64, Request)>,
    reply: Option<(u64, Reply)>,
    /// End of the suspension.
    suspended: u64,
    /// Time of its next action.
    next: u64,
    commits: u64,
}

impl Machine {
    fn clock(&self, now: u64) -> Duration {
        Duration::from_millis(self.offset + now * self.rate / 1000)
    }

    /// Returns true if its job computes.
    fn computes(&self, now: u64) -> bool {
        let Role::Holds(held) = &self.role else {
            return false;
        };
        now >= self.suspended && held.is_valid(self.clock(now))
    }

    fn is_idle(&self) -> bool {
        self.request.is_none() && self.reply.is_none()
    }
}

struct Model {
    log: Vec<State>,
    machines: Vec<Machine>,
    fate: Fate,
    now: u64,
    /// Images whose commit was answered.
    committed: Vec<String>,
    takeovers: usize,
}

impl Model {
    fn new(choices: Vec<u32>) -> Self {
        let mut fate = Fate {
            choices: choices.into_iter(),
        };
        let machines = (0..3).map(|number| Machine {
            name: format!("m{number}"),
            // Up to 5 % slow or fast.
            rate: 950 + fate.below(101),
            offset: fate.below(1_000_000),
            role: Role::Waits(None),
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
            committed: Vec::new(),
            takeovers: 0,
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
        if let Some(newest) = self.log.last() {
            for object in &self.committed {
                let is_there = newest.images.iter().any(|image| image.object == *object);
                assert!(is_there, "the committed image {object} is lost");
            }
        }
    }

    /// Lets the store answer a request that has arrived.
    fn server(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        let Some((_, request)) = machine.request.take_if(|(at, _)| *at <= self.now) else {
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
        machine.reply = Some((self.now + delay, reply));
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
                    let is_commit = self.fate.below(3) == 1;
                    self.change(number, is_commit, clock);
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
            (Some((serial, state)), Role::Waits(Some(watched))) if clock >= watched.free_at() => {
                Some((serial + 1, state.taken_by(holder, ttl_ms)))
            }
            (None, Role::Waits(Some(_))) => Some((0, State::first(holder, ttl_ms))),
            _ => None,
        };
        machine.next = self.now + 1000;
        let request = next.map_or(Request::Look, |(serial, state)| {
            Request::Append(self.append(serial, state, clock))
        });
        self.send(number, request);
    }

    fn append(&self, serial: usize, mut state: State, begun: Duration) -> Append {
        // As random as the nonce of the log: no two entries are the same.
        state.nonce = self.now * 8 + u64::try_from(serial).unwrap() * 10_000_000_000;
        state.nonce += u64::try_from(begun.as_nanos() % 7).unwrap();
        state.nonce = state.nonce.wrapping_mul(31) + state.holder.store.len() as u64;
        Append {
            serial,
            state,
            begun,
        }
    }

    fn change(&mut self, number: usize, is_commit: bool, clock: Duration) {
        let machine = &mut self.machines[number];
        let Some((serial, state)) = machine.known.clone() else {
            return;
        };
        let change = if is_commit {
            machine.commits += 1;
            Change::Commit(RemoteImage {
                object: format!("{}-{}-{}", machine.name, machine.epoch, machine.commits),
                number: machine.commits,
                created_unix_ms: 0,
                raw_bytes: 0,
            })
        } else {
            Change::Renew
        };
        match state.changed(machine.epoch, &change) {
            Ok(state) => {
                let append = self.append(serial + 1, state, clock);
                self.send(number, Request::Append(append));
            }
            Err(_) => self.stop(number),
        }
    }

    fn receive(&mut self, number: usize, reply: Reply) {
        let now = self.now;
        let machine = &mut self.machines[number];
        let clock = machine.clock(now);
        match (reply, &mut machine.role) {
            (Reply::Lost(request), _) => self.send(number, request),
            (Reply::Newest(newest), Role::Waits(watched)) => {
                machine.known.clone_from(&newest);
                let serial = newest.map_or(0, |(serial, _)| serial as u64);
                watched
                    .get_or_insert(Watched::new(serial, TTL, clock))
                    .see(serial, TTL, clock);
            }
            (Reply::Newest(newest), Role::Holds(_)) => machine.known = newest,
            (Reply::Appended(append, true), role) => {
                let is_takeover = matches!(role, Role::Waits(_));
                if is_takeover {
                    machine.epoch = append.state.epoch;
                    *role = Role::Holds(Held::new(TTL, append.begun));
                    self.takeovers += 1;
                } else if let Role::Holds(held) = role {
                    held.renewed(append.begun);
                    if let Some(image) = append.state.images.last()
                        && image
                            .object
                            .starts_with(&format!("{}-{}-", machine.name, machine.epoch))
                        && !self.committed.contains(&image.object)
                    {
                        self.committed.push(image.object.clone());
                    }
                }
                machine.known = Some((append.serial, append.state));
            }
            (Reply::Appended(_, false), Role::Waits(watched)) => *watched = None,
            (Reply::Appended(_, false), Role::Holds(_)) => self.send(number, Request::Look),
            (Reply::Newest(_) | Reply::Appended(..), Role::Stopped) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn one_machine_at_a_time_runs_the_job(choices in prop::collection::vec(any::<u32>(), 0..4000)) {
        let mut model = Model::new(choices);
        model.run();
        // After the faults, one of them holds the lease.
        let computing = model.machines.iter().filter(|machine| machine.computes(END_MS)).count();
        prop_assert_eq!(computing, 1);
    }
}

/// The model reaches what it checks.
#[test]
fn the_model_has_takeovers_and_commits() {
    let choices =
        |seed: u32| (0..4000_u32).map(move |n| (n ^ seed).wrapping_mul(2_654_435_761) >> 7);
    let models = (0..20).map(|seed| {
        let mut model = Model::new(choices(seed).collect());
        model.run();
        model
    });
    let reached = models.map(|model| (model.takeovers, model.committed.len()));
    let (takeovers, commits) = reached.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert!(takeovers > 40 && commits > 40, "{takeovers} {commits}");
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
