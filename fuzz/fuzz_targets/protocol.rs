//! See `ckpt_run::fuzzing::protocol`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let _ = ckpt_run::fuzzing::protocol(input);
});
