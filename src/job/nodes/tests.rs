//! Tests of the recording and creation of nodes, with real folders.

use std::fs::{File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::super::files::Access;
use super::*;
use crate::safe_path::JobUsers;

fn folder(path: &Path) -> Node {
    let (uid, gid) = (
        nix::unistd::getuid().as_raw(),
        nix::unistd::getgid().as_raw(),
    );
    Node {
        path: path.to_owned(),
        kind: NodeKind::Folder,
        mode: 0o2750,
        owner: (uid, gid),
    }
}

fn names(nodes: &[Node]) -> Vec<&Path> {
    nodes.iter().map(|node| node.path.as_path()).collect()
}

/// Creates a temporary folder whose path contains no links.
fn place() -> (tempfile::TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().canonicalize().unwrap();
    (place, path)
}

#[test]
fn nodes_are_recorded_with_the_folders_above_them() {
    let (_place, path) = place();
    for name in ["socket", "pipe", "folder", "kept", "read", "removed"] {
        fs::create_dir(path.join(name)).unwrap();
    }
    let _socket = UnixListener::bind(path.join("socket/listen")).unwrap();
    let _removed = UnixListener::bind(path.join("removed/listen")).unwrap();
    fs::remove_file(path.join("removed/listen")).unwrap();
    mkfifo(&path.join("pipe/fifo"), Mode::from_bits_truncate(0o640)).unwrap();
    let read_write = || File::options().read(true).write(true).clone();
    let _pipe = read_write().open(path.join("pipe/fifo")).unwrap();
    let _folder = File::open(path.join("folder")).unwrap();
    fs::write(path.join("read/file"), "x").unwrap();
    let _read = File::open(path.join("read/file")).unwrap();
    let kept = OpenFile {
        path: path.join("kept/file"),
        access: Access::Update,
        inode: 1,
        size: 1,
        modified_ns: 0,
        mode: 0o600,
        owner: (0, 0),
        in_memory: false,
        sample: None,
        changed: false,
        is_locked: false,
        links: Vec::new(),
        rewrites: false,
        is_mapped: false,
    };
    let me = i32::try_from(std::process::id()).unwrap();
    let nodes = needed(&[Descriptors::of(me).unwrap()], &[kept]).nodes;
    let below: Vec<&Path> = names(&nodes)
        .into_iter()
        .filter_map(|node| node.strip_prefix(&path).ok())
        .collect();
    let expected = ["", "folder", "kept", "pipe", "pipe/fifo", "socket"];
    assert_eq!(below, expected.map(Path::new));
    let working_directory = std::env::current_dir().unwrap();
    assert!(names(&nodes).contains(&working_directory.as_path()));
    // Other nodes belong to tests that run at the same time.
    let ours: Vec<Node> = nodes
        .into_iter()
        .filter(|node| node.path.starts_with(&path))
        .collect();
    let fifo = ours.iter().find(|node| node.kind == NodeKind::Fifo);
    assert_eq!(fifo.map(|fifo| fifo.mode), Some(0o640));
    assert!(missing(&ours).unwrap().is_empty(), "all exist");
}

#[test]
fn missing_nodes_are_created_and_existing_ones_unchanged() {
    let (_place, path) = place();
    let (there, gone) = (path.join("there"), path.join("there/gone"));
    fs::create_dir(&there).unwrap();
    let mode_before = fs::metadata(&there).unwrap().mode();
    let mut fifo = folder(&gone.join("deep/fifo"));
    (fifo.kind, fifo.mode) = (NodeKind::Fifo, 0o604);
    let nodes = [
        fifo,
        folder(&gone.join("deep")),
        folder(&there),
        folder(&gone),
    ];
    let plan = missing(&nodes).unwrap();
    let deep = gone.join("deep");
    assert_eq!(names(&plan), [&gone, &deep, &deep.join("fifo")]);
    assert!(!gone.exists(), "a plan changes nothing");
    remake(&plan, &JobUsers::default()).unwrap();
    remake(&plan, &JobUsers::default()).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode();
    assert_eq!(mode(&there), mode_before);
    assert_eq!((mode(&gone), mode(&deep)), (0o042_750, 0o042_750));
    assert_eq!(mode(&deep.join("fifo")), 0o010_604);
    assert!(missing(&nodes).unwrap().is_empty());
}

#[test]
fn paths_that_no_snapshot_records_are_refused() {
    for path in [
        "",
        "relative",
        "../up",
        "/",
        "/tmp/../etc/x",
        "/tmp/./x",
        "/tmp//x",
        "/tmp/x/",
    ] {
        let result = missing(&[folder(Path::new(path))]);
        assert!(matches!(result, Err(NodesError::Senseless(_))), "{path:?}");
    }
    let long = format!("/{}", "x/".repeat(3000));
    assert!(matches!(
        missing(&[folder(Path::new(long.trim_end_matches('/')))]),
        Err(NodesError::Senseless(_))
    ));
    let mut odd = folder(Path::new("/tmp/x"));
    odd.mode = 0o10_000;
    assert!(matches!(missing(&[odd]), Err(NodesError::Senseless(_))));
}

#[test]
fn more_folders_than_a_snapshot_records_are_refused() {
    let nodes = vec![folder(Path::new("/")); NODES_MAX + 1];
    assert!(matches!(missing(&nodes), Err(NodesError::TooMany(_))));
}

#[test]
fn creation_through_a_link_or_a_file_is_refused() {
    let (_place, path) = place();
    let elsewhere = path.join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, path.join("link")).unwrap();
    symlink("nowhere", path.join("dangling")).unwrap();
    fs::write(path.join("file"), "x").unwrap();
    let cases = [
        ("link/new", "link"),
        ("link/deep/new", "link"),
        ("dangling", "dangling"),
        ("file", "file"),
        ("file/new", "file"),
    ];
    for (wanted, obstacle) in cases {
        let result = missing(&[folder(&path.join(wanted))]);
        assert!(
            matches!(&result, Err(NodesError::Obstructed { obstacle: found, .. }) if *found == path.join(obstacle)),
            "{wanted}: {result:?}"
        );
    }
    // The link is created between plan and execution.
    let result = remake(&[folder(&path.join("link/new"))], &JobUsers::default());
    assert!(
        matches!(result, Err(NodesError::Obstructed { .. })),
        "{result:?}"
    );
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    assert_eq!(fs::read_to_string(path.join("file")).unwrap(), "x");
    // The whole folder was moved, and a link is in its place.
    assert!(missing(&[folder(&path.join("link"))]).unwrap().is_empty());
}

#[test]
fn a_foreign_folder_in_a_shared_folder_is_refused() {
    let (_place, path) = place();
    let inner = path.join("inner");
    fs::create_dir(&inner).unwrap();
    let mut node = folder(&inner);
    node.owner.0 = 12_345;
    let another = Permissions::from_mode(0o1777);
    if !nix::unistd::getuid().is_root() {
        eprintln!("SKIPPED: needs root");
        return;
    }
    std::os::unix::fs::chown(&inner, Some(54_321), None).unwrap();
    assert!(
        missing(std::slice::from_ref(&node)).unwrap().is_empty(),
        "a private place"
    );
    fs::set_permissions(&path, another).unwrap();
    assert!(matches!(
        missing(&[node]),
        Err(NodesError::Foreign { owner: 54_321, .. })
    ));
}
