//! Names of files, folders and sockets that CRIU cannot restore: each is refused by name, as in `refused_kinds`.

use super::refused_kinds::refused_until_it_lets_go;
use crate::harness::{apply, as_root, as_root_and_user};

#[apply(as_root_and_user)]
fn a_removed_folder_with_another_in_its_place_is_named() {
    let script = r#"
os.mkdir("folder"); folder = os.open("folder", os.O_RDONLY)
os.rmdir("folder"); os.mkdir("folder")
hold(lambda: os.close(folder))
"#;
    refused_until_it_lets_go(
        script,
        &["has the removed /", "/folder open", "in its place"],
    );
}

#[apply(as_root_and_user)]
fn a_removed_file_in_a_folder_that_is_made_first_is_named() {
    for let_go in ["os.close(outer)", "os.dup2(outer, 200), os.close(outer)"] {
        let script = format!(
            r#"
import shutil
os.makedirs("outer/inner")
outer = os.open("outer", os.O_RDONLY)
inner = os.open("outer/inner/file", os.O_RDWR | os.O_CREAT)
shutil.rmtree("outer")
hold(lambda: ({let_go}))
"#
        );
        let message = [
            "/outer/inner/file open",
            "removed folder /",
            "close or leave",
        ];
        refused_until_it_lets_go(&script, &message);
    }
}

/// Binds a socket as `first`, moves its file, and expects a refusal.
fn moved_socket_is_named(moves: &str) {
    let script = format!(
        r"
name = os.path.abspath('first'); served = socket.socket(socket.AF_UNIX); served.bind(name); served.listen()
{moves}
hold(lambda: served.close())
"
    );
    refused_until_it_lets_go(&script, &["unix socket", "/first", "let the job"]);
}

#[apply(as_root_and_user)]
fn a_unix_socket_with_a_link_in_another_folder_is_named() {
    moved_socket_is_named("os.mkdir('other'); os.link(name, 'other/name')");
}

#[apply(as_root)]
fn a_unix_socket_whose_former_name_is_taken_is_named() {
    moved_socket_is_named("os.rename(name, 'final'); open(name, 'w').close()");
}

#[apply(as_root_and_user)]
fn a_connection_that_nobody_has_a_name_for_is_named() {
    let script = r#"
server, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
name = os.path.abspath("name")
server.bind(name); server.listen(); client.connect(name); accepted, _ = server.accept()
server.close(); os.remove(name); client.close()
hold(lambda: accepted.close())
"#;
    refused_until_it_lets_go(script, &["/name", "other end was closed"]);
}

#[apply(as_root_and_user)]
fn a_file_whose_names_are_in_other_folders_is_named() {
    for holds in ["file", "mmap.mmap(file.fileno(), 1), file.close()"] {
        let script = format!(
            r#"
import mmap
os.mkdir("cache"); file = open("name", "w+"); file.write("x"); file.flush()
os.link("name", "cache/name"); os.unlink("name"); held = [{holds}]
hold(lambda: held.pop(0).close())
"#
        );
        refused_until_it_lets_go(&script, &["/name open or mapped", "other folders"]);
    }
}

#[apply(as_root_and_user)]
fn a_removed_file_with_a_long_name_is_named() {
    let script = r#"
name = "n" * 240
file = os.open(name, os.O_RDWR | os.O_CREAT); os.unlink(name)
hold(lambda: os.close(file))
"#;
    refused_until_it_lets_go(script, &["nnn open", "too long", "237"]);
}
