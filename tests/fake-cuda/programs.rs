//! Programs on the GPU: only ckpt-run's program for fingerprints exists, and it is computed here as its text says.

use std::ffi::{CStr, c_char, c_uint, c_void};

use super::c::{give, read};
use super::code::{Answer, INVALID_VALUE};
use super::gate::calls;
use super::process::process;

const NAME: &CStr = c"ckpt_run_fingerprints";
/// Handles of the module and of its program.
const MODULE: usize = 0x40;
const PROGRAM: usize = 0x48;
const THREADS: usize = 512;
const BLOCK: usize = 256 << 10;
/// Words of the keys of both levels.
const FIRST: usize = 66;
const SECOND: usize = 4 * THREADS + 2;

fn product(x: u64, y: u64, keys: &[u64]) -> u128 {
    u128::from(x.wrapping_add(keys[0])) * u128::from(y.wrapping_add(keys[1]))
}

/// Computes the fingerprint of a block.
#[allow(clippy::many_single_char_names, reason = "as in the program's text")]
fn fingerprint(block: &[u64], keys: &[u64]) -> [u64; 4] {
    let (first, second) = keys.split_at(FIRST);
    let (mut c, mut d) = (0u128, 0u128);
    for thread in 0..THREADS {
        let (mut a, mut b) = (0u128, 0u128);
        for word in 0..BLOCK / 16 / THREADS {
            let at = 2 * (word * THREADS + thread);
            let (x, y) = (block[at], block[at + 1]);
            a = a.wrapping_add(product(x, y, &first[2 * word..]));
            b = b.wrapping_add(product(x, y, &first[2 * word + 2..]));
        }
        let own = &second[4 * thread..];
        let (a, b) = ([a as u64, (a >> 64) as u64], [b as u64, (b >> 64) as u64]);
        c = c
            .wrapping_add(product(a[0], a[1], own))
            .wrapping_add(product(b[0], b[1], &own[2..]));
        d = d
            .wrapping_add(product(a[0], a[1], &own[2..]))
            .wrapping_add(product(b[0], b[1], &own[4..]));
    }
    [c as u64, (c >> 64) as u64, d as u64, (d >> 64) as u64]
}

/// Returns device memory as words.
fn words<'a>(address: u64, count: usize) -> Result<&'a mut [u64], i32> {
    process().check_range(address, count as u64 * 8)?;
    // SAFETY: checked; the program has the memory to itself.
    Ok(unsafe { std::slice::from_raw_parts_mut(address as *mut u64, count) })
}

fn run(parameters: *const *const c_void) -> Answer {
    if parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the program has four parameters of 64 bits.
    let parameter = |place: usize| read(unsafe { (*parameters.add(place)).cast::<u64>() });
    let (memory, count) = (parameter(0)?, parameter(1)? as usize);
    let keys = words(parameter(2)?, FIRST + SECOND)?;
    let blocks = words(memory, count * BLOCK / 8)?;
    let results = words(parameter(3)?, count * 4)?;
    for (block, result) in blocks.chunks(BLOCK / 8).zip(results.chunks_mut(4)) {
        result.copy_from_slice(&fingerprint(block, keys));
    }
    Ok(())
}

calls! {
    2010 fn cuModuleLoadData(module: *mut usize, image: *const c_void) {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller passes a text that ends with a zero.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        let entry = format!(".visible .entry {}(", NAME.to_string_lossy());
        if !text.contains(&entry) {
            return Err(INVALID_VALUE);
        }
        give(module, MODULE)
    }
    2000 fn cuModuleUnload(module: usize) {
        if module == MODULE { Ok(()) } else { Err(INVALID_VALUE) }
    }
    2000 fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        // SAFETY: the caller passes a text that ends with a zero.
        if module != MODULE || name.is_null() || unsafe { CStr::from_ptr(name) } != NAME {
            return Err(INVALID_VALUE);
        }
        give(function, PROGRAM)
    }
    4000 fn cuLaunchKernel(
        function: usize,
        _grid_x: c_uint,
        _grid_y: c_uint,
        _grid_z: c_uint,
        block_x: c_uint,
        _block_y: c_uint,
        _block_z: c_uint,
        _shared: c_uint,
        _stream: usize,
        parameters: *const *const c_void,
        _extra: *const *const c_void,
    ) {
        if function != PROGRAM || block_x as usize != THREADS {
            return Err(INVALID_VALUE);
        }
        run(parameters)
    }
}
