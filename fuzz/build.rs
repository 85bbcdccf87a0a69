//! Build script that links GCC's library statically, so that the programs run on machines without GCC.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // The standard library requests the shared library by this name.
    fs::write(folder.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)").expect("it is writable");
    println!("cargo:rustc-link-search=native={}", folder.display());
    println!("cargo:rerun-if-changed=build.rs");
}
