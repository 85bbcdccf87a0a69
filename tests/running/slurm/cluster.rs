//! A Slurm of one node: munged, slurmctld and slurmd of the system, with a key, ports, logs and a state of their own.
//!
//! They run in a PID namespace, whose end is that of everything they have started, whatever a test comes to.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use super::super::common::{LIMIT, Place};
use super::super::{has, stderr, stdout};

/// What has to be there; `scripts/setup-tests` installs Slurm's.
const PROGRAMS: [&str; 7] = [
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "setpriv",
    "unshare",
];
/// The first that ends ends all.
const DAEMONS: &str = r#"
    here=$PWD
    munged --foreground --force --num-threads=2 --socket="$here/munge" --key-file="$here/key" \
        --pid-file="$here/munged.pid" --log-file="$here/munged.log" --seed-file="$here/seed" &
    until [[ -S munge ]]; do sleep 0.05; done
    slurmctld -D &
    slurmd -D &
    wait -n
"#;
/// Longest a job takes to what is waited for: Slurm looks at time limits every 30 s, and takes its time to requeue.
const JOB_LIMIT: Duration = Duration::from_secs(180);
/// Time between two questions to Slurm.
const POLL: Duration = Duration::from_millis(100);
/// The end of a log that says why.
const LOG_TAIL_BYTES: usize = 3000;

/// Ended with all its jobs when dropped.
pub struct Cluster<'a> {
    place: &'a Place,
    daemons: Child,
}

impl<'a> Cluster<'a> {
    /// `None` after saying why the test is skipped.
    pub fn start(place: &'a Place) -> Option<Self> {
        if !PROGRAMS.into_iter().all(has) {
            return None;
        }
        let folder = place.file("slurm");
        prepare(&folder);
        let log = |name: &str| fs::File::create(folder.join(name)).unwrap();
        let mut daemons = command(place, "setpriv");
        daemons
            .args(["--pdeathsig", "KILL", "unshare", "--pid", "--fork"])
            .args(["--kill-child", "--mount-proc", "bash", "-c", DAEMONS])
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(log("out"))
            .stderr(log("err"));
        let mut cluster = Self {
            place,
            daemons: daemons.spawn().unwrap(),
        };
        let begun = Instant::now();
        while !stdout(&cluster.ask("sinfo", &["--noheader", "--format=%T"])).contains("idle") {
            if cluster.daemons.try_wait().unwrap().is_some() || begun.elapsed() > LIMIT {
                eprintln!("SKIPPED: Slurm does not start here: {}", cluster.said());
                return None;
            }
            std::thread::sleep(POLL);
        }
        Some(cluster)
    }

    /// Runs one of Slurm's programs to its end.
    pub fn ask(&self, program: &str, arguments: &[&str]) -> Output {
        command(self.place, program)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// The same, when it cannot fail.
    pub fn tell(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.ask(program, arguments);
        assert!(output.status.success(), "{program}: {}", stderr(&output));
        stdout(&output).trim().to_owned()
    }

    /// The new job's id.
    pub fn submit(&self, script: &str, options: &[&str]) -> String {
        let name = "job.sbatch";
        fs::write(self.place.file(name), script).unwrap();
        self.tell("sbatch", &[&["--parsable"], options, &[name]].concat())
    }

    /// What Slurm knows of a job, as `Key=Value` words.
    pub fn job(&self, id: &str) -> String {
        stdout(&self.ask("scontrol", &["--oneliner", "show", "job", id]))
    }

    /// Waits until Slurm knows all of these words of a job.
    pub fn wait_for(&self, id: &str, words: &[&str]) {
        let begun = Instant::now();
        loop {
            let known = self.job(id);
            let known: Vec<&str> = known.split_whitespace().collect();
            if words.iter().all(|word| known.contains(word)) {
                return;
            }
            assert!(
                begun.elapsed() < JOB_LIMIT,
                "no {words:?}: {known:?}\n{}",
                self.place.text(&messages_of(id))
            );
            std::thread::sleep(POLL);
        }
    }

    /// Waits until the job has a step, which the script starts to hear of preemptions.
    pub fn wait_for_step(&self, id: &str) {
        let step = format!("{id}.0");
        let arguments = ["--noheader", "--steps", "--format=%i", "--jobs", id];
        let begun = Instant::now();
        while !self
            .tell("squeue", &arguments)
            .lines()
            .any(|line| line.trim() == step)
        {
            assert!(begun.elapsed() < JOB_LIMIT, "no step: {}", self.job(id));
            std::thread::sleep(POLL);
        }
    }

    fn said(&self) -> String {
        ["err", "slurmctld.log", "slurmd.log", "munged.log"]
            .map(|name| {
                let text = self.place.text(&format!("slurm/{name}"));
                let tail = text.len().saturating_sub(LOG_TAIL_BYTES);
                let tail = String::from_utf8_lossy(&text.as_bytes()[tail..]).into_owned();
                format!("--- {name}\n{tail}")
            })
            .concat()
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        let _ = self.daemons.kill();
        let _ = self.daemons.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
    }
}

/// Where the templates let all messages go.
pub fn messages_of(id: &str) -> String {
    format!("train-{id}.err")
}

/// A program that talks to this cluster, as a user of it would call it.
fn command(place: &Place, program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLURM_") {
            command.env_remove(name);
        }
    }
    let path = std::env::var("PATH").unwrap();
    let bin = place.file("slurm/bin");
    command
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display()))
        .env("SLURM_CONF", place.file("slurm/slurm.conf"))
        .env("XDG_CONFIG_HOME", place.path())
        .env_remove("CKPT_RUN_STORE")
        .current_dir(place.path());
    command
}

fn prepare(folder: &Path) {
    fs::create_dir_all(folder.join("bin")).unwrap();
    symlink(env!("CARGO_BIN_EXE_ckpt-run"), folder.join("bin/ckpt-run")).unwrap();
    let mut key = [0; 128];
    getrandom::fill(&mut key).unwrap();
    fs::write(folder.join("key"), key).unwrap();
    fs::set_permissions(folder.join("key"), fs::Permissions::from_mode(0o400)).unwrap();
    fs::write(folder.join("slurm.conf"), configuration(folder)).unwrap();
    fs::write(folder.join("gres.conf"), "Name=gpu File=/dev/null\n").unwrap();
}

/// One node with one GPU, which is `/dev/null`. `cred_expire` is also how long a requeued job waits.
fn configuration(folder: &Path) -> String {
    let host = nix::unistd::gethostname().unwrap();
    let host = host.to_string_lossy();
    let host = host.split('.').next().unwrap();
    let folder = folder.display();
    let [controller, node] = free_ports();
    format!(
        "\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
KillWait=10
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2 Gres=gpu:1
PartitionName=batch Nodes=node Default=YES PriorityTier=1 PreemptMode=OFF
PartitionName=preemptible Nodes=node PriorityTier=1 GraceTime=60
PartitionName=graceless Nodes=node PriorityTier=1
PartitionName=urgent Nodes=node PriorityTier=2 PreemptMode=OFF
"
    )
}

/// Free now. Slurm has no way to be given a port that is taken already.
fn free_ports() -> [u16; 2] {
    let taken = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    taken.map(|listener| listener.local_addr().unwrap().port())
}
