//! Paths and numbers, without an allocator.

use core::ffi::CStr;

/// Longest path: `/proc/PID/task/TID/status` with two numbers of ten digits.
const PATH_BYTES: usize = 64;

/// A short path in `/proc`.
pub type Text = Buffer<PATH_BYTES>;

/// A short text that ends with a zero. What does not fit is left out.
pub struct Buffer<const BYTES: usize> {
    bytes: [u8; BYTES],
    length: usize,
}

impl<const BYTES: usize> Buffer<BYTES> {
    pub fn new() -> Self {
        Self {
            bytes: [0; BYTES],
            length: 0,
        }
    }

    pub fn push(&mut self, more: &[u8]) {
        for byte in more {
            if self.length + 1 < BYTES {
                self.bytes[self.length] = *byte;
                self.length += 1;
            }
        }
    }

    /// Appends a number that is not negative, in decimal.
    pub fn push_number(&mut self, number: impl Into<i64>) {
        let number = number.into();
        if number >= 10 {
            self.push_number(number / 10);
        }
        let digit = usize::try_from(number % 10).unwrap_or_default();
        self.push(&b"0123456789"[digit..=digit]);
    }

    pub fn as_c(&self) -> &CStr {
        // The last byte is never written.
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }
}

/// Returns the value of a whole decimal number.
pub fn number(word: &[u8]) -> Option<u32> {
    let mut value: Option<u32> = None;
    for byte in word {
        let digit = byte.is_ascii_digit().then(|| u32::from(byte - b'0'))?;
        value = Some(value.unwrap_or(0).checked_mul(10)?.checked_add(digit)?);
    }
    value
}

/// Returns the hexadecimal number that follows `name` in a text.
pub fn hexadecimal(text: &[u8], name: &[u8]) -> Option<u64> {
    let at = text.windows(name.len()).position(|window| window == name)?;
    let digits = text.get(at + name.len()..)?;
    let digit = |byte: &u8| (*byte as char).to_digit(16).map(u64::from);
    let mut value = None;
    for digit in digits.iter().map_while(digit).take(16) {
        value = Some(value.unwrap_or(0) << 4 | digit);
    }
    value
}
