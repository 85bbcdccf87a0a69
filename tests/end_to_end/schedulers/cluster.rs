//! Slurm cluster of a few nodes: the system's munged, slurmctld and slurmd, with separate key, ports, logs and state.
//!
//! The daemons run as root in a PID namespace, so that all their processes end with it, whatever the test's outcome. Each
//! node has a PID namespace inside, and a host name; all nodes share the disk. Jobs are those of the test's user, who gets
//! an account there.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tempfile::TempDir;

use crate::harness::{LIMIT, Place, installed, program, skip, stderr, stdout};

/// Required programs; `scripts/setup-tests` installs Slurm's.
const PROGRAMS: [&str; 7] = [
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "setpriv",
    "unshare",
];
/// The first daemon that exits ends all.
const DAEMONS: &str = r#"
    here=$PWD
    mount --bind accounts /etc/passwd
    # A machine whose power goes when there is a file that says so.
    node() {
        unshare --uts --pid --fork --kill-child --mount-proc bash -c "hostname $1; exec slurmd -D" &
        until [[ -e off-$1 ]]; do
            kill -0 $! 2>/dev/null || return
            sleep 0.1
        done
        kill -KILL $!
        sleep infinity
    }
    munged --foreground --force --num-threads=2 --socket="$here/munge" --key-file="$here/key" \
        --pid-file="$here/munged.pid" --log-file="$here/munged.log" --seed-file="$here/seed" &
    until [[ -S munge ]]; do sleep 0.05; done
    slurmctld -D &
    for name in "$@"; do node "$name" & done
    wait -n
"#;
/// Time limit for a job's progress: Slurm checks time limits every 30 s, and a requeue takes time.
const JOB_LIMIT: Duration = Duration::from_secs(180);
/// Time between two queries of Slurm.
const POLL: Duration = Duration::from_millis(100);
/// Names of nodes; a cluster has the first ones.
pub const NODES: [&str; 2] = ["node-1", "node-2"];
/// Length of the end of a log, which contains the reason.
const LOG_TAIL_BYTES: usize = 3000;

/// Cluster, ended with all its jobs on drop.
pub struct Cluster<'a> {
    place: &'a Place,
    /// Folder of the daemons, outside of the job's.
    folder: TempDir,
    daemons: Child,
    nodes: &'static [&'static str],
}

impl<'a> Cluster<'a> {
    /// Starts a cluster with this many nodes, with a GPU each; returns `None` after printing the reason for skipping
    /// the test.
    pub fn start(place: &'a Place, nodes: usize) -> Option<Self> {
        if !PROGRAMS.into_iter().all(installed) {
            return None;
        }
        if !geteuid().is_root() {
            skip("a Slurm of the test's own needs root");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let nodes = &NODES[..nodes];
        prepare(folder.path(), place, nodes);
        let log = |name: &str| fs::File::create(folder.path().join(name)).unwrap();
        let mut daemons = command(place, folder.path(), "setpriv");
        daemons
            .args(["--pdeathsig", "KILL", "unshare", "--pid", "--fork"])
            .args([
                "--kill-child",
                "--mount-proc",
                "bash",
                "-c",
                DAEMONS,
                "daemons",
            ])
            .args(nodes)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(log("out"))
            .stderr(log("err"));
        let daemons = daemons.spawn().unwrap();
        let mut cluster = Self {
            place,
            folder,
            daemons,
            nodes,
        };
        let begun = Instant::now();
        while !cluster.is_idle() {
            if cluster.daemons.try_wait().unwrap().is_some() || begun.elapsed() > LIMIT {
                skip(&format!("Slurm does not start here: {}", cluster.said()));
                return None;
            }
            std::thread::sleep(POLL);
        }
        Some(cluster)
    }

    fn is_idle(&self) -> bool {
        let states = stdout(&self.ask("sinfo", &["--noheader", "--Node", "--format=%T"]));
        states.contains("idle") && states.lines().all(|state| state.trim() == "idle")
    }

    /// Simulates a power failure of the node.
    pub fn lose(&self, node: &str) {
        fs::write(self.folder.path().join(format!("off-{node}")), "").unwrap();
    }

    /// Runs one of Slurm's programs to its end, as the test's user.
    pub fn ask(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = command(self.place, self.folder.path(), program);
        self.place.own(&mut command);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Does the same for a command that must succeed.
    pub fn tell(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.ask(program, arguments);
        assert!(output.status.success(), "{program}: {}", stderr(&output));
        stdout(&output).trim().to_owned()
    }

    /// Submits a job; returns its id.
    pub fn submit(&self, script: &str, options: &[&str]) -> String {
        let name = "train.sbatch";
        fs::write(self.place.file(name), script).unwrap();
        self.tell("sbatch", &[&["--parsable"], options, &[name]].concat())
    }

    /// Returns Slurm's description of a job, as `Key=Value` words.
    pub fn job(&self, id: &str) -> String {
        stdout(&self.ask("scontrol", &["--oneliner", "show", "job", id]))
    }

    /// Waits until Slurm's description of a job contains all of these words.
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

    /// Waits until the job has a step, which the script starts to be informed of preemptions.
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
        let of_nodes = self.nodes.iter().map(|node| format!("{node}.log"));
        let others = ["err", "slurmctld.log", "munged.log"].map(str::to_owned);
        others
            .into_iter()
            .chain(of_nodes)
            .map(|name| {
                let text = fs::read(self.folder.path().join(&name)).unwrap_or_default();
                let tail = text.len().saturating_sub(LOG_TAIL_BYTES);
                let tail = String::from_utf8_lossy(&text[tail..]).into_owned();
                format!("--- {name}\n{tail}")
            })
            .collect()
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

/// Returns the path to which the templates direct all messages.
pub fn messages_of(id: &str) -> String {
    format!("train-{id}.err")
}

/// Returns a command that uses this cluster as its users would.
fn command(place: &Place, folder: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLURM_") {
            command.env_remove(name);
        }
    }
    let path = std::env::var("PATH").unwrap();
    let bin = folder.join("bin");
    command
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display()))
        .env("SLURM_CONF", folder.join("slurm.conf"))
        .env("XDG_CONFIG_HOME", place.path())
        .env_remove("CKPT_RUN_STORE")
        .current_dir(place.path());
    command
}

fn prepare(folder: &Path, place: &Place, nodes: &[&str]) {
    // For the socket of munge, and the configuration.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(folder.join("bin")).unwrap();
    symlink(program(), folder.join("bin/ckpt-run")).unwrap();
    let mut key = [0; 128];
    getrandom::fill(&mut key).unwrap();
    fs::write(folder.join("key"), key).unwrap();
    fs::set_permissions(folder.join("key"), fs::Permissions::from_mode(0o400)).unwrap();
    fs::write(folder.join("slurm.conf"), configuration(folder, nodes)).unwrap();
    let accounts = fs::read_to_string("/etc/passwd").unwrap() + &place.account();
    fs::write(folder.join("accounts"), accounts).unwrap();
    fs::write(folder.join("gres.conf"), "Name=gpu File=/dev/null\n").unwrap();
}

/// Returns Slurm's configuration. A GPU is `/dev/null`. `cred_expire` is also the delay of a requeued job.
fn configuration(folder: &Path, nodes: &[&str]) -> String {
    let host = nix::unistd::gethostname().unwrap();
    let host = host.to_string_lossy();
    let host = host.split('.').next().unwrap();
    let folder = folder.display();
    let (controller, ports) = free_ports(nodes.len());
    let names = nodes.join(",");
    let lines: String = nodes
        .iter()
        .zip(ports)
        .map(|(node, port)| {
            format!(
                "NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=2 Gres=gpu:1\n"
            )
        })
        .collect();
    format!(
        "\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdTimeout=20
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
{lines}\
PartitionName=batch Nodes={names} Default=YES PriorityTier=1 PreemptMode=OFF
PartitionName=preemptible Nodes={names} PriorityTier=1 GraceTime=60
PartitionName=graceless Nodes={names} PriorityTier=1
PartitionName=urgent Nodes={names} PriorityTier=2 PreemptMode=OFF
"
    )
}

/// Returns a free port, and one for each node. Slurm cannot be given an open socket.
fn free_ports(nodes: usize) -> (u16, Vec<u16>) {
    let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
    let port = |listener: &TcpListener| listener.local_addr().unwrap().port();
    let controller = bind();
    let others: Vec<TcpListener> = (0..nodes).map(|_| bind()).collect();
    (port(&controller), others.iter().map(port).collect())
}
