//! CUDA program that executes the commands on its standard input, one per line, and answers each with a line.
//!
//! It finds the driver by `dlsym` or `cuGetProcAddress` (first argument), or is linked to it (`--cfg linked`).
#![allow(unsafe_code, reason = "calls the driver through C")]

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io::{BufRead, Write};
use std::mem::transmute;
use std::sync::OnceLock;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(code: c_int) -> !;
}

#[cfg(linked)]
#[link(name = "cuda")]
unsafe extern "C" {
    fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int;
    fn cuMemFree_v2(address: u64) -> c_int;
    fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, address: u64) -> c_int;
}

type ProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;

fn library() -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    // SAFETY: the name ends with a zero; the library's constructors have no requirements.
    let open = || unsafe { dlopen(c"libcuda.so.1".as_ptr(), 2) } as usize;
    *LIBRARY.get_or_init(open) as *mut c_void
}

/// Finds a function by its exported name, or by base name and version through `cuGetProcAddress`.
fn find(name: &str, base: &str, version: c_int) -> *mut c_void {
    #[cfg(linked)]
    match name {
        "cuMemAlloc_v2" => return cuMemAlloc_v2 as *mut c_void,
        "cuMemFree_v2" => return cuMemFree_v2 as *mut c_void,
        "cuMemGetAddressRange_v2" => return cuMemGetAddressRange_v2 as *mut c_void,
        _ => {}
    }
    let text = CString::new(name).unwrap();
    let found = if std::env::args().nth(1).as_deref() == Some("asking") {
        // SAFETY: the library stays open; the name ends with a zero.
        let ask = unsafe { dlsym(library(), c"cuGetProcAddress_v2".as_ptr()) };
        assert!(!ask.is_null(), "cuGetProcAddress_v2");
        // SAFETY: the function of this name has this type.
        let ask: ProcAddress = unsafe { transmute(ask) };
        // The CUDA runtime looks up `cuGetProcAddress` itself first.
        let (mut better, mut found, mut status) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        let itself = c"cuGetProcAddress".as_ptr();
        // SAFETY: the name ends with a zero; there is room for both results.
        let code = unsafe { ask(itself, &raw mut better, 12000, 0, &raw mut status) };
        assert_eq!(code, 0);
        // SAFETY: version 12.0 of the function has this type.
        let ask: ProcAddress = unsafe { transmute(better) };
        let base = CString::new(base).unwrap();
        // SAFETY: the name ends with a zero; there is room for both results.
        let code = unsafe { ask(base.as_ptr(), &raw mut found, version, 0, &raw mut status) };
        assert_eq!(code, 0);
        found
    } else {
        // SAFETY: the library stays open; the name ends with a zero.
        unsafe { dlsym(library(), text.as_ptr()) }
    };
    assert!(!found.is_null(), "{name}");
    found
}

/// Defines driver calls as functions of this program. A pointer must point to as much memory as the driver uses.
macro_rules! cuda {
    ($($name:ident $symbol:literal $base:literal $version:literal ($($argument:ident: $type:ty),*);)*) => {
        $(fn $name($($argument: $type),*) -> c_int {
            static FOUND: OnceLock<usize> = OnceLock::new();
            let found = *FOUND.get_or_init(|| find($symbol, $base, $version) as usize);
            // SAFETY: the function of this name has this type.
            let function: unsafe extern "C" fn($($type),*) -> c_int = unsafe { transmute(found) };
            // SAFETY: the callers below pass pointers to memory of the length that the driver uses.
            unsafe { function($($argument),*) }
        })*
    };
}

cuda! {
    init "cuInit" "cuInit" 2000 (flags: u32);
    retain "cuDevicePrimaryCtxRetain" "cuDevicePrimaryCtxRetain" 7000 (context: *mut usize, device: c_int);
    reset "cuDevicePrimaryCtxReset_v2" "cuDevicePrimaryCtxReset" 11000 (device: c_int);
    create "cuCtxCreate_v2" "cuCtxCreate" 3020 (context: *mut usize, flags: u32, device: c_int);
    destroy "cuCtxDestroy_v2" "cuCtxDestroy" 4000 (context: usize);
    set_current "cuCtxSetCurrent" "cuCtxSetCurrent" 4000 (context: usize);
    enable_peer "cuCtxEnablePeerAccess" "cuCtxEnablePeerAccess" 4000 (context: usize, flags: u32);
    alloc "cuMemAlloc_v2" "cuMemAlloc" 3020 (address: *mut u64, len: usize);
    free "cuMemFree_v2" "cuMemFree" 3020 (address: u64);
    range "cuMemGetAddressRange_v2" "cuMemGetAddressRange" 3020 (base: *mut u64, len: *mut usize, address: u64);
    upload "cuMemcpyHtoD_v2" "cuMemcpyHtoD" 3020 (address: u64, from: *const c_void, len: usize);
    get_handle "cuIpcGetMemHandle" "cuIpcGetMemHandle" 4010 (handle: *mut [u8; 64], address: u64);
    open_handle "cuIpcOpenMemHandle_v2" "cuIpcOpenMemHandle" 11000 (address: *mut u64, handle: Handle, flags: u32);
    close_handle "cuIpcCloseMemHandle" "cuIpcCloseMemHandle" 4010 (address: u64);
    download "cuMemcpyDtoH_v2" "cuMemcpyDtoH" 3020 (to: *mut c_void, address: u64, len: usize);
    reserve "cuMemAddressReserve" "cuMemAddressReserve" 10020
        (address: *mut u64, len: usize, alignment: usize, wanted: u64, flags: u64);
    make "cuMemCreate" "cuMemCreate" 10020 (handle: *mut u64, len: usize, properties: *const Properties, flags: u64);
    drop_handle "cuMemRelease" "cuMemRelease" 10020 (handle: u64);
    map "cuMemMap" "cuMemMap" 10020 (address: u64, len: usize, offset: usize, handle: u64, flags: u64);
    unmap "cuMemUnmap" "cuMemUnmap" 10020 (address: u64, len: usize);
    set_access "cuMemSetAccess" "cuMemSetAccess" 10020
        (address: u64, len: usize, access: *const [c_int; 3], count: usize);
    share "cuMemExportToShareableHandle" "cuMemExportToShareableHandle" 10020
        (descriptor: *mut c_int, handle: u64, kind: c_int, flags: u64);
    take "cuMemImportFromShareableHandle" "cuMemImportFromShareableHandle" 10020
        (handle: *mut u64, descriptor: *mut c_void, kind: c_int);
    retain_handle "cuMemRetainAllocationHandle" "cuMemRetainAllocationHandle" 11000
        (handle: *mut u64, address: *mut c_void);
    properties "cuMemGetAllocationPropertiesFromHandle" "cuMemGetAllocationPropertiesFromHandle" 10020
        (properties: *mut Properties, handle: u64);
}

/// `CUipcMemHandle`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Handle([u8; 64]);

/// `CUmemAllocationProp`: type, types of handles, type and number of the location, and the rest.
#[derive(Clone, Copy)]
#[repr(C)]
struct Properties([c_int; 8]);

/// Calls a driver function for memory that this program maps itself. Handles and addresses have names.
fn mapped(names: &mut HashMap<String, u64>, words: &[&str]) -> Option<String> {
    let value = |place: usize| names.get(words[place]).copied().unwrap_or(0);
    let len = |place: usize| words[place].parse::<usize>().unwrap();
    // An address is a name, and the number of bytes from there.
    let address = |place: usize| value(place) + len(place + 1) as u64;
    let mut result = 0;
    let code = match words[0] {
        "reserve" => reserve(&raw mut result, len(2), 0, 0, 0),
        "create" => {
            let (types, device) = (words[3].parse().unwrap(), 0);
            let properties = Properties([1, types, 1, device, 0, 0, 0, 0]);
            make(&raw mut result, len(2), &raw const properties, 0)
        }
        "create-on-host" => {
            let properties = Properties([1, 0, 3, 0, 0, 0, 0, 0]);
            make(&raw mut result, len(2), &raw const properties, 0)
        }
        "create-for-arrays" => {
            let properties = Properties([1, 0, 1, 0, 0, 0, 1 << 16, 0]);
            make(&raw mut result, len(2), &raw const properties, 0)
        }
        "retain" => retain_handle(&raw mut result, address(2) as *mut c_void),
        "import" => {
            let mut descriptor = -1;
            share(&raw mut descriptor, value(2), 1, 0);
            let handle = usize::try_from(descriptor).unwrap_or(usize::MAX);
            take(&raw mut result, handle as *mut c_void, 1)
        }
        "drop" => return Some(drop_handle(value(1)).to_string()),
        "map" => return Some(map(address(1), len(3), 0, value(4), 0).to_string()),
        "unmap" => return Some(unmap(address(1), len(3)).to_string()),
        "access" => {
            let access = [1, 0, words[4].parse().unwrap()];
            return Some(set_access(address(1), len(3), &raw const access, 1).to_string());
        }
        "put" => return Some(write(address(1), len(3), len(4) as u64).to_string()),
        "look" => return Some(is_same(address(1), len(3), len(4) as u64).to_string()),
        "types" => {
            let mut found = Properties([0; 8]);
            let code = properties(&raw mut found, value(1));
            return Some(format!("{code} {:?}", &found.0[..4]));
        }
        "share" => {
            let mut descriptor = -1;
            let code = share(&raw mut descriptor, value(1), 1, 0);
            return Some(format!("{code} {}", descriptor >= 0));
        }
        _ => return None,
    };
    names.insert(words[1].to_owned(), result);
    Some(format!("{code} {}", result != 0))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Handle {
    let mut bytes = [0; 64];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    }
    Handle(bytes)
}

fn pattern(len: usize, seed: u64) -> Vec<u64> {
    (0..len as u64 / 8)
        .map(|index| (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed))
        .collect()
}

fn write(address: u64, len: usize, seed: u64) -> c_int {
    upload(address, pattern(len, seed).as_ptr().cast(), len)
}

fn is_same(address: u64, len: usize, seed: u64) -> bool {
    let mut found = vec![0u64; len / 8];
    download(found.as_mut_ptr().cast(), address, len) == 0 && found == pattern(len, seed)
}

fn allocate(len: usize) -> (c_int, u64) {
    let mut address = 0;
    (alloc(&raw mut address, len), address)
}

/// Runs threads that allocate, write, check and free; returns the number of failed checks.
fn churn(threads: u64, rounds: u64, context: usize) -> u64 {
    let one = move |thread: u64| {
        set_current(context);
        let mut bad = 0;
        for round in 0..rounds {
            let len = usize::try_from((2 + (thread + round) % 3) << 20).unwrap();
            let (code, address) = allocate(len);
            let seed = thread << 32 | round;
            let good = code == 0 && write(address, len, seed) == 0 && is_same(address, len, seed);
            bad += u64::from(!good || free(address) != 0);
        }
        bad
    };
    let threads: Vec<_> = (0..threads)
        .map(|thread| std::thread::spawn(move || one(thread)))
        .collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .sum()
}

/// Lists the descriptors by kind.
fn descriptors() -> String {
    let names = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let links = names.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let count =
        |what: &str, links: &[String]| links.iter().filter(|link| link.contains(what)).count();
    let links: Vec<String> = links.map(|link| link.display().to_string()).collect();
    format!(
        "memory {} sockets {}",
        count("/d0-", &links) + count("/d1-", &links),
        count("socket:", &links)
    )
}

/// Reports, from a child, which uses of its parent's memory succeed.
fn forked(address: u64) -> String {
    // SAFETY: glibc keeps its allocator usable in the child, which needs nothing else of other threads.
    let child = unsafe { fork() };
    if child == 0 {
        let answer = format!(
            "free {} alloc {} {}",
            free(address),
            allocate(4 << 20).0,
            descriptors()
        );
        std::fs::write(format!("/tmp/agent-fork-{}", std::process::id()), answer).unwrap();
        // SAFETY: does not return.
        unsafe { _exit(0) };
    }
    let mut status = 0;
    // SAFETY: the status has room.
    unsafe { waitpid(child, &raw mut status, 0) };
    let path = format!("/tmp/agent-fork-{child}");
    let answer = std::fs::read_to_string(&path).unwrap_or_default();
    let _ = std::fs::remove_file(path);
    format!("{status} {answer}")
}

fn symbol_of_all(name: &str) -> bool {
    let name = CString::new(name).unwrap();
    // SAFETY: RTLD_DEFAULT; the name ends with a zero.
    !unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) }.is_null()
}

fn main() {
    let mut contexts: HashMap<u64, usize> = HashMap::new();
    let mut names = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        if let Some(answer) = mapped(&mut names, &words) {
            println!("{answer}");
            continue;
        }
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        let len = |index: usize| words[index].parse::<usize>().unwrap();
        let device = |index: usize| words[index].parse::<c_int>().unwrap();
        let answer = match words[0] {
            "global" => symbol_of_all(words[1]).to_string(),
            "init" => {
                let code = init(0);
                let mut context = 0;
                let retained = retain(&raw mut context, 0);
                contexts.insert(0, context);
                format!("{code} {retained} {}", set_current(context))
            }
            "context" => {
                let mut context = 0;
                let code = create(&raw mut context, 0, device(2));
                contexts.insert(number(1), context);
                code.to_string()
            }
            "enter" => set_current(contexts.get(&number(1)).copied().unwrap_or(0)).to_string(),
            "destroy" => destroy(contexts[&number(1)]).to_string(),
            "reset" => reset(device(1)).to_string(),
            "peer" => enable_peer(contexts[&number(1)], 0).to_string(),
            "alloc" => {
                let (code, address) = allocate(len(1));
                format!("{code} {address}")
            }
            "free" => free(number(1)).to_string(),
            "write" => write(number(1), len(2), number(3)).to_string(),
            "check" => is_same(number(1), len(2), number(3)).to_string(),
            "range" => {
                let (mut base, mut len) = (0, 0);
                let code = range(&raw mut base, &raw mut len, number(1));
                format!("{code} {base} {len}")
            }
            // Runs in another thread, which may hang; the answer comes later.
            "later-alloc" => {
                let (context, len) = (contexts[&0], len(1));
                std::thread::spawn(move || {
                    set_current(context);
                    let (code, address) = allocate(len);
                    println!("later {code} {address}");
                });
                "begun".to_owned()
            }
            // Runs in another thread, which is inside the driver until the file exists.
            "hold" => {
                let path = CString::new(words[1]).unwrap();
                // SAFETY: the library stays open; the name ends with a zero.
                let hold = unsafe { dlsym(library(), c"fakeHoldDriverLock".as_ptr()) };
                assert!(!hold.is_null(), "fakeHoldDriverLock");
                // SAFETY: the function of this name has this type.
                let hold: unsafe extern "C" fn(*const c_char) -> c_int = unsafe { transmute(hold) };
                // SAFETY: the path ends with a zero, and the thread owns it.
                std::thread::spawn(move || unsafe { hold(path.as_ptr()) });
                "begun".to_owned()
            }
            "export" => {
                let mut handle = [0; 64];
                let code = get_handle(&raw mut handle, number(1));
                format!("{code} {}", hex(&handle))
            }
            "open" => {
                let mut address = 0;
                let code = open_handle(&raw mut address, unhex(words[1]), 1);
                format!("{code} {address}")
            }
            "close" => close_handle(number(1)).to_string(),
            "churn" => churn(number(1), number(2), contexts[&0]).to_string(),
            "fork" => forked(number(1)),
            "descriptors" => descriptors(),
            "exec" => {
                use std::os::unix::process::CommandExt;
                println!("executing");
                let mut itself = std::process::Command::new("/proc/self/exe");
                panic!("{}", itself.args(std::env::args().skip(1)).exec());
            }
            "cost" => {
                let (name, rounds) = (CString::new(words[1]).unwrap(), number(2));
                let begun = std::time::Instant::now();
                for _ in 0..rounds {
                    // SAFETY: the library stays open; the name ends with a zero.
                    unsafe { dlsym(library(), name.as_ptr()) };
                }
                format!("{} ns", begun.elapsed().as_nanos() / u128::from(rounds))
            }
            other => panic!("{other}"),
        };
        println!("{answer}");
        std::io::stdout().flush().unwrap();
    }
}
