//! Layout of `src/`: permitted uses between folders, the code that changes the disk, sizes of files and folders.
//!
//! The rules are those of ARCHITECTURE.md. A failure lists every violation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{ItemMod, ItemUse, UseTree};

/// Top-level modules from top to bottom. A module uses modules of lower floors only; modules of one floor do not use
/// each other.
const FLOORS: [&[&str]; 13] = [
    &["main", "lib"],
    &["fuzzing"],
    &["cli"],
    &["rehearsal", "report"],
    &["supervisor"],
    &["doctor", "restore", "snapshot"],
    &["gpu"],
    &["run"],
    &["remote_run"],
    &[
        "agent_client",
        "config",
        "copier",
        "criu",
        "files",
        "history",
        "job",
        "sandbox",
        "store",
    ],
    &["cuda"],
    &[
        "agent",
        "checked",
        "clock",
        "fd_passing",
        "known_errors",
        "mount_table",
        "network_socket",
        "path_walk",
        "plugin",
        "safe_path",
        "secret",
        "shared_memory",
        "sparse_file",
        "sync",
        "telemetry",
        "trust",
        "witness",
    ],
    &["path_text", "printable"],
];

/// Folders of separate crates, which `build.rs` compiles.
const OTHER_CRATES: [&str; 3] = ["agent", "plugin", "witness"];

/// Maximum number of source files in a folder, without `mod.rs`.
const FILES_MAX: usize = 20;
/// Maximum length of a file, in lines.
const LINES_MAX: usize = 500;
/// Minimum length of a file, in lines: a shorter one belongs into the file that uses it.
const LINES_MIN: usize = 50;
/// Maximum number of files that import each other, directly or through others.
const CYCLE_MAX: usize = 10;
/// Limit on the length of a chain of re-exports.
const RE_EXPORTS_MAX: usize = 8;
/// Files that may be shorter, because they are the single place of something or are separate for a reason.
const SHORT: [&str; 5] = [
    "main.rs",      // entry points
    "mod.rs",       // docs and re-exports
    "error.rs",     // one error enum a module
    "exit_code.rs", // the exit codes of the supervisor, used on several floors
    "sync.rs",      // used by every floor
];
/// Folder whose files contain one verb of the command line each, however short.
const VERBS: &str = "cli";
/// Prefix of files with entry points for fuzzing, which are beside the private code that they call.
const FUZZ_PREFIX: &str = "fuzz_";
/// File names that many folders have.
const SHARED_NAMES: [&str; 3] = ["mod.rs", "error.rs", "tests.rs"];

/// Calls that change something on disk, or open a file for that.
const DISK_CHANGES: [&str; 17] = [
    "fs::copy",
    "fs::create",
    "fs::hard_link",
    "fs::remove",
    "fs::rename",
    "fs::set_permissions",
    "fs::write",
    "DirBuilder",
    "File::create",
    "File::options",
    "OpenOptions",
    "fallocate",
    ".set_len(",
    ".sync_all(",
    ".sync_data(",
    ".write_all_at(",
    ".write_at(",
];

#[test]
fn modules_use_lower_floors_only() {
    let floor: BTreeMap<&str, usize> = FLOORS
        .iter()
        .enumerate()
        .flat_map(|(number, modules)| modules.iter().map(move |module| (*module, number)))
        .collect();
    let mut wrong = Vec::new();
    let mut arrows = 0;
    for file in sources() {
        let from = module_path(&file);
        let top = from.first().map_or("lib", String::as_str);
        for to in used_modules(&file) {
            let Some(&below) = floor.get(to.as_str()) else {
                continue; // an item of the crate's root
            };
            if to == top {
                continue;
            }
            arrows += 1;
            let above = floor
                .get(top)
                .unwrap_or_else(|| panic!("no floor for {top}"));
            if below <= *above {
                wrong.push(format!("{} uses {to}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "not downwards:\n{}", wrong.join("\n"));
    assert!(arrows > 300, "only {arrows} uses were found");
}

#[test]
fn every_module_of_the_crate_has_a_floor() {
    let known: BTreeSet<&str> = FLOORS.iter().copied().flatten().copied().collect();
    let found: BTreeSet<String> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(known, found);
}

#[test]
fn the_store_changes_the_disk_in_store_fs_only() {
    let store = root().join("store");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in sources() {
        let is_checked = file.starts_with(&store)
            && !file.starts_with(store.join("fs"))
            && !file.starts_with(store.join("tests"))
            && !is_for_tests(&file);
        if !is_checked {
            continue;
        }
        seen += 1;
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for call in DISK_CHANGES.iter().filter(|call| code.contains(**call)) {
            wrong.push(format!("{} has {call}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 50, "only {seen} files were read");
}

#[test]
fn folders_hold_two_to_twenty_files() {
    let mut files: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for file in sources() {
        let is_module = file.file_name().unwrap() != "mod.rs";
        *files.entry(file.parent().unwrap().to_owned()).or_default() += usize::from(is_module);
    }
    let wrong: Vec<_> = files
        .iter()
        .filter(|(_, count)| !(1..=FILES_MAX).contains(*count))
        .chain(
            files
                .iter()
                .filter(|(folder, count)| **count == 1 && !folder.join("mod.rs").exists()),
        )
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn files_have_fifty_to_five_hundred_lines() {
    let mut wrong = Vec::new();
    for file in sources() {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        let name = file.file_name().unwrap().to_str().unwrap();
        let may_be_short = SHORT.contains(&name)
            || name.starts_with(FUZZ_PREFIX)
            || file.starts_with(root().join(VERBS));
        if lines > LINES_MAX || lines < LINES_MIN && !may_be_short {
            wrong.push(format!("{}: {lines} lines", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_file_has_a_name_of_its_own() {
    let mut places: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for file in sources() {
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        if !SHARED_NAMES.contains(&name.as_str()) {
            places.entry(name).or_default().push(file);
        }
    }
    places.retain(|_, files| files.len() > 1);
    assert!(places.is_empty(), "{places:#?}");
}

/// What decisions of the supervisor must not use.
const NOT_PURE: [&str; 7] = [
    "crate::clock",
    "std::fs",
    "std::io",
    "std::process",
    "std::thread",
    "tracing::",
    ".elapsed()",
];

#[test]
fn decisions_of_the_supervisor_do_no_io() {
    let folder = root().join("supervisor/decide");
    let decides = |file: &&PathBuf| {
        let name = file.file_stem().unwrap().to_str().unwrap();
        file.starts_with(&folder) && !["tests", "world", "world_steps"].contains(&name)
    };
    let files = sources();
    let mut wrong = Vec::new();
    for file in files.iter().filter(decides) {
        let text = fs::read_to_string(file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for word in NOT_PURE.iter().filter(|word| code.contains(**word)) {
            wrong.push(format!("{} has {word}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(files.iter().filter(decides).count() > 8);
}

#[test]
fn at_most_ten_files_import_each_other() {
    let imports = imports();
    let edges: usize = imports.values().map(BTreeSet::len).sum();
    assert!(edges > 1500, "only {edges} imports were found");
    let reachable: BTreeMap<_, _> = imports
        .keys()
        .map(|from| (from, reachable(&imports, from)))
        .collect();
    let cycle = |from: &Vec<String>| -> Vec<String> {
        let forward = reachable[from].iter();
        let both_ways = forward.filter(|to| reachable[**to].contains(from));
        both_ways.map(|to| to.join("/")).collect()
    };
    let largest = imports.keys().map(cycle).max_by_key(Vec::len).unwrap();
    println!("largest import cycle: {} files", largest.len());
    assert!(
        largest.len() <= CYCLE_MAX,
        "{} files import each other:\n{}",
        largest.len(),
        largest.join("\n")
    );
}

/// Returns the modules that a module imports, directly or through others.
fn reachable<'a>(
    imports: &'a BTreeMap<Vec<String>, BTreeSet<Vec<String>>>,
    from: &'a Vec<String>,
) -> BTreeSet<&'a Vec<String>> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(module) = next.pop() {
        next.extend(imports[module].iter().filter(|to| found.insert(*to)));
    }
    found
}

/// Returns the imports of each file, as module paths. An import through a re-export counts as an import of the file that
/// has the item. Imports of tests do not count.
fn imports() -> BTreeMap<Vec<String>, BTreeSet<Vec<String>>> {
    let files: BTreeMap<Vec<String>, Uses> = sources()
        .into_iter()
        .filter(|file| !is_for_tests(file))
        .map(|file| (module_path(&file), uses_of(&file, Tests::Skipped)))
        .collect();
    let import = |module: &Vec<String>, uses: &Uses| {
        let found = uses.paths.iter().filter_map(|path| home(&files, path, 0));
        found.filter(|to| to != module && !to.is_empty()).collect()
    };
    let imports = files.iter();
    imports
        .map(|(module, uses)| (module.clone(), import(module, uses)))
        .collect()
}

/// Returns the module that has the item of a path.
fn home(files: &BTreeMap<Vec<String>, Uses>, path: &[String], depth: usize) -> Option<Vec<String>> {
    let module = (0..=path.len())
        .rev()
        .map(|length| &path[..length])
        .find(|module| files.contains_key(*module))?;
    let item = path.get(module.len());
    match item.and_then(|item| files[module].exports.get(item)) {
        Some(place) if depth < RE_EXPORTS_MAX => {
            let path = [place.as_slice(), &path[module.len() + 1..]].concat();
            home(files, &path, depth + 1)
        }
        _ => Some(module.to_vec()),
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Returns all source files of the crate, without those of the crates that `build.rs` compiles.
fn sources() -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && !OTHER_CRATES.contains(&name) {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 300, "only {} files were found", files.len());
    files.sort();
    files
}

fn is_for_tests(file: &Path) -> bool {
    let name = file.file_name().unwrap().to_str().unwrap();
    name == "tests.rs" || name.starts_with(FUZZ_PREFIX) || file.parent().unwrap().ends_with("tests")
}

/// Returns the module path of a file, from the root of the crate.
fn module_path(file: &Path) -> Vec<String> {
    let relative = file.strip_prefix(root()).unwrap().with_extension("");
    let mut path: Vec<String> = relative
        .iter()
        .map(|part| part.to_str().unwrap().to_owned())
        .collect();
    if matches!(path.last().map(String::as_str), Some("mod" | "lib")) {
        path.pop();
    }
    path
}

/// Returns the top-level modules that a file names, in `use` items, in other paths and in the arguments of macros.
fn used_modules(file: &Path) -> BTreeSet<String> {
    let paths = uses_of(file, Tests::Read).paths.into_iter();
    paths.filter_map(|path| path.into_iter().next()).collect()
}

fn uses_of(file: &Path, tests: Tests) -> Uses {
    let text = fs::read_to_string(file).unwrap();
    let parsed =
        syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let mut uses = Uses {
        module: module_path(file),
        tests,
        paths: BTreeSet::new(),
        exports: BTreeMap::new(),
    };
    uses.visit_file(&parsed);
    uses
}

/// Treatment of the modules of tests in a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tests {
    Read,
    Skipped,
}

/// Collector of the paths that a file names, from the root of the crate.
struct Uses {
    /// Module that is being read.
    module: Vec<String>,
    tests: Tests,
    paths: BTreeSet<Vec<String>>,
    /// Re-exported items, and their paths; they are among `paths` if tests are read.
    exports: BTreeMap<String, Vec<String>>,
}

impl Uses {
    /// Returns a path from the root of the crate, if it begins with `crate`, `self` or `super`.
    fn absolute(&self, path: &[String]) -> Option<Vec<String>> {
        let mut at = match path.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("self" | "super") => self.module.clone(),
            _ => return None,
        };
        for part in path {
            match part.as_str() {
                "crate" | "self" => {}
                "super" => drop(at.pop()),
                name => at.push(name.to_owned()),
            }
        }
        Some(at)
    }

    fn add(&mut self, path: &[String]) {
        let path = self.absolute(path).filter(|path| !path.is_empty());
        self.paths.extend(path);
    }

    fn add_export(&mut self, path: &[String], name: &syn::Ident) {
        let relative = || [self.module.as_slice(), path].concat();
        let path = self.absolute(path).unwrap_or_else(relative);
        self.exports.insert(name.to_string(), path);
    }

    fn add_tree(&mut self, prefix: &[String], tree: &UseTree, exported: bool) {
        let with = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.add_tree(&with(&path.ident), &path.tree, exported),
            UseTree::Name(name) if exported => self.add_export(&with(&name.ident), &name.ident),
            UseTree::Rename(new) if exported => self.add_export(&with(&new.ident), &new.rename),
            UseTree::Name(name) => self.add(&with(&name.ident)),
            UseTree::Rename(rename) => self.add(&with(&rename.ident)),
            UseTree::Glob(_) => self.add(prefix),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_tree(prefix, tree, exported);
                }
            }
        }
    }

    /// Reads the paths in the arguments of a macro, which are tokens only.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        for token in tokens {
            match token {
                TokenTree::Group(group) => {
                    self.add(&std::mem::take(&mut path));
                    self.add_tokens(group.stream());
                }
                TokenTree::Ident(name) => path.push(name.to_string()),
                TokenTree::Punct(punct) if punct.as_char() == ':' => {}
                TokenTree::Punct(_) | TokenTree::Literal(_) => {
                    self.add(&std::mem::take(&mut path));
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let is_for_tests = item.ident == "tests";
        if is_for_tests && self.tests == Tests::Skipped {
            return;
        }
        self.module.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_public = !matches!(item.vis, syn::Visibility::Inherited);
        let exported = is_public && self.tests == Tests::Skipped;
        self.add_tree(&[], &item.tree, exported);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path
            .segments
            .iter()
            .map(|part| part.ident.to_string())
            .collect();
        self.add(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.add_tokens(called.tokens.clone());
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
