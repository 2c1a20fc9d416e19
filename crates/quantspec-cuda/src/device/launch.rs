//! What a launch needs: a kernel, its grid, its arguments.

use super::{Buffer, Plain};
use cudarc::driver::sys;
use std::collections::BTreeSet;
use std::ptr;
use std::sync::Mutex;

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub(super) function: sys::CUfunction,
    pub(super) name: &'static str,
}

// SAFETY: a function handle is valid in every thread while its module is loaded, and modules live as long as the device.
unsafe impl Send for Kernel {}
// SAFETY: see above.
unsafe impl Sync for Kernel {}

/// A copy of the name with static lifetime, so that [`Kernel`] can be `Copy`. Each of the few hundred names is leaked once.
pub(super) fn kept(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match names.get(name) {
        Some(kept) => kept,
        None => {
            let kept: &'static str = Box::leak(name.into());
            names.insert(kept);
            kept
        }
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    /// Launch while the previous kernel still runs (programmatic dependent launch); the kernel waits itself (`grid_wait`).
    pub overlap: bool,
}

/// A kernel argument: a value of up to eight bytes, or a struct by reference.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// A pointer or a 64-bit number.
    Long(u64),
    /// A 32-bit number.
    Int(i32),
    /// A 32-bit float.
    Float(f32),
    /// A struct passed by value, as bytes.
    Bytes(&'a [u8]),
}

impl<'a> Arg<'a> {
    /// A struct passed by value.
    pub fn of<T: Plain>(value: &'a T) -> Arg<'a> {
        // SAFETY: a plain type has only initialised bytes.
        Arg::Bytes(unsafe { std::slice::from_raw_parts(ptr::from_ref(value).cast(), size_of::<T>()) })
    }
}

impl From<&Buffer> for Arg<'_> {
    fn from(buffer: &Buffer) -> Self {
        Arg::Long(buffer.address)
    }
}

impl From<u64> for Arg<'_> {
    fn from(value: u64) -> Self {
        Arg::Long(value)
    }
}

impl From<i32> for Arg<'_> {
    fn from(value: i32) -> Self {
        Arg::Int(value)
    }
}

impl From<usize> for Arg<'_> {
    /// A count, as a 32-bit kernel argument. Checked in release builds too: a kernel would write elsewhere.
    fn from(value: usize) -> Self {
        assert!(value <= i32::MAX as usize, "a kernel argument of {value}");
        Arg::Int(value as i32)
    }
}

impl From<f32> for Arg<'_> {
    fn from(value: f32) -> Self {
        Arg::Float(value)
    }
}

/// `args![a, b, ...]`: an array of [`Arg`].
#[macro_export]
macro_rules! args {
    ($($value:expr),* $(,)?) => { [$($crate::device::Arg::from($value)),*] };
}
