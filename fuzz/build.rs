//! The programs shall run where there is no GCC: its library goes into them.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // The standard library asks for the shared one by this name.
    fs::write(folder.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)").expect("it is writable");
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rerun-if-changed=build.rs");
}
