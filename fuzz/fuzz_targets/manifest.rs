//! See `ckpt_run::fuzzing::manifest`.
#![no_main]

use ckpt_run::fuzzing;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    fuzzing::run(fuzzing::manifest, input);
});
