//! Detection of GPUs through the driver, without a binding that could panic.

use crate::images;
use libloading::{Library, Symbol};
use quantspec_core::{Error, Result};
use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

/// The driver's library, which is never part of a toolkit.
const LIBRARY: &str = if cfg!(windows) { "nvcuda.dll" } else { "libcuda.so.1" };

/// Oldest CUDA version of a driver that runs the images (12.0, driver 525), in the driver's encoding: 1000 major + 10 minor.
const OLDEST_DRIVER: c_int = 12000;

const NO_DEVICE: c_int = 100;
const MULTIPROCESSORS: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Marketing name.
    pub name: String,
    /// Compute capability, such as "9.0".
    pub compute_capability: String,
    /// Total memory, in bytes.
    pub memory_bytes: u64,
    /// Driver version, or the CUDA version it supports if that is unreadable.
    pub driver: String,
    /// Compute capability times ten.
    pub(crate) capability: u32,
    /// Architecture its kernels were compiled for; 0 if there are none.
    pub(crate) architecture: u32,
    /// Streaming multiprocessors (SMs).
    pub sms: usize,
}

impl DeviceInfo {
    /// Returns true if there are kernels for heads of `d` channels. Pages of 256 channels need 96 KiB of shared memory per
    /// block, available from compute capability 8.0 on.
    pub fn takes_heads_of(&self, d: usize) -> bool {
        self.is_usable() && (matches!(d, 64 | 128) || d == 256 && self.architecture >= 80)
    }

    /// Returns true if this library has kernels for the device.
    pub fn is_usable(&self) -> bool {
        self.refusal().is_none()
    }

    /// Why it cannot be used; `None` if it can.
    fn refusal(&self) -> Option<Error> {
        let DeviceInfo { name, compute_capability, .. } = self;
        if self.capability < images::OLDEST {
            return Some(Error::device(
                format!("{name} has compute capability {compute_capability}, and kernels exist from 7.5 on"),
                "use another GPU (quantspec doctor lists them) or --device cpu",
            ));
        }
        (self.architecture == 0).then(|| {
            Error::device(
                format!("{name} has compute capability {compute_capability}, and this library was built without kernels for it"),
                "use --device cpu, or build it again with QUANTSPEC_KERNELS=on",
            )
        })
    }
}

/// The GPUs of this machine, and why none can be used if that is so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detection {
    /// At least one device can run the kernels.
    pub available: bool,
    /// One line: why no device is usable, or what was found.
    pub reason: String,
    /// All devices of the driver, in its order, including unusable ones.
    pub devices: Vec<DeviceInfo>,
}

/// Detects GPUs. Never panics and never creates a context: it opens the driver's library, initialises it and reads
/// properties.
pub fn detect() -> Detection {
    if !images::present() {
        return Detection {
            available: false,
            reason: "this library was built without GPU kernels (QUANTSPEC_KERNELS=off)".to_owned(),
            devices: Vec::new(),
        };
    }
    match devices() {
        Err(error) => Detection { available: false, reason: error.message, devices: Vec::new() },
        Ok(devices) => {
            let usable = devices.iter().find(|device| device.is_usable());
            let reason = match usable {
                Some(device) => format!(
                    "{}, compute capability {}, driver {}",
                    device.name, device.compute_capability, device.driver
                ),
                None => match devices.first().and_then(DeviceInfo::refusal) {
                    Some(refusal) => refusal.message,
                    None => "the driver shows no GPU".to_owned(),
                },
            };
            Detection { available: usable.is_some(), reason, devices }
        }
    }
}

/// Device `index`, if kernels can run on it.
///
/// # Errors
/// [`quantspec_core::ErrorKind::Usage`] if the driver shows no such device, [`quantspec_core::ErrorKind::Device`] if it or the
/// driver cannot be used.
pub(crate) fn device(index: usize) -> Result<DeviceInfo> {
    if !images::present() {
        return Err(Error::device(
            "this library was built without GPU kernels (QUANTSPEC_KERNELS=off)",
            "use --device cpu, or build it again without that setting",
        ));
    }
    let devices = devices()?;
    let count = devices.len();
    let Some(device) = devices.into_iter().nth(index) else {
        return Err(Error::usage(
            format!("device cuda:{index} does not exist, the driver shows {count}"),
            "quantspec doctor lists the devices",
        ));
    };
    device.refusal().map_or(Ok(device), Err)
}

/// An error and its cause: the loader's message, such as the name of a missing file, is in the cause.
fn with_cause(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", with_cause(cause)),
        None => error.to_string(),
    }
}

/// The driver's library, opened once and never closed.
fn library() -> Result<&'static Library> {
    static OPENED: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    // SAFETY: loading the driver runs only its own initialisers.
    let opened = OPENED.get_or_init(|| unsafe { Library::new(LIBRARY) }.map_err(|error| with_cause(&error)));
    opened.as_ref().map_err(|reason| {
        Error::device(
            format!("no NVIDIA driver: {reason}"),
            "install the NVIDIA driver (525 or newer), or use --device cpu",
        )
    })
}

/// All devices, through six functions that every driver has.
fn devices() -> Result<Vec<DeviceInfo>> {
    let library = library()?;
    // SAFETY: the signatures are those of cuda.h; they have not changed since CUDA 3.2. Every buffer has the length passed with
    // it.
    unsafe {
        let version: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> = symbol(library, "cuDriverGetVersion")?;
        let init: Symbol<unsafe extern "C" fn(u32) -> c_int> = symbol(library, "cuInit")?;
        let count: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> = symbol(library, "cuDeviceGetCount")?;
        let get: Symbol<unsafe extern "C" fn(*mut c_int, c_int) -> c_int> = symbol(library, "cuDeviceGet")?;
        let name: Symbol<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
            symbol(library, "cuDeviceGetName")?;
        let memory: Symbol<unsafe extern "C" fn(*mut usize, c_int) -> c_int> = symbol(library, "cuDeviceTotalMem_v2")?;
        let attribute: Symbol<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int> =
            symbol(library, "cuDeviceGetAttribute")?;

        let mut cuda = 0;
        check(library, "cuDriverGetVersion", version(&mut cuda))?;
        if cuda < OLDEST_DRIVER {
            return Err(Error::device(
                format!("the NVIDIA driver supports CUDA {}.{}, and 12.0 is needed", cuda / 1000, cuda % 1000 / 10),
                "install driver 525 or newer, or use --device cpu",
            ));
        }
        match init(0) {
            NO_DEVICE => return Err(hidden()),
            status => check(library, "cuInit", status)?,
        }
        let mut devices = 0;
        match count(&mut devices) {
            NO_DEVICE => return Err(hidden()),
            status => check(library, "cuDeviceGetCount", status)?,
        }
        if devices == 0 {
            return Err(hidden());
        }
        let driver = driver_version().unwrap_or_else(|| format!("CUDA {}.{}", cuda / 1000, cuda % 1000 / 10));
        let mut found = Vec::new();
        for index in 0..devices {
            let (mut handle, mut bytes, mut major, mut minor, mut sms) = (0, 0usize, 0, 0, 0);
            let mut text = [0 as c_char; 256];
            check(library, "cuDeviceGet", get(&mut handle, index))?;
            check(library, "cuDeviceGetName", name(text.as_mut_ptr(), text.len() as c_int - 1, handle))?;
            check(library, "cuDeviceTotalMem", memory(&mut bytes, handle))?;
            check(library, "cuDeviceGetAttribute", attribute(&mut major, MAJOR, handle))?;
            check(library, "cuDeviceGetAttribute", attribute(&mut minor, MINOR, handle))?;
            check(library, "cuDeviceGetAttribute", attribute(&mut sms, MULTIPROCESSORS, handle))?;
            let capability = u32::try_from(major * 10 + minor).unwrap_or(0);
            found.push(DeviceInfo {
                name: CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned(),
                compute_capability: format!("{major}.{minor}"),
                memory_bytes: bytes as u64,
                driver: driver.clone(),
                sms: usize::try_from(sms).unwrap_or(0),
                capability,
                architecture: images::architecture(capability).unwrap_or(0),
            });
        }
        Ok(found)
    }
}

fn symbol<'a, T>(library: &'a Library, name: &str) -> Result<Symbol<'a, T>> {
    // SAFETY: the caller passes the type that cuda.h gives `name`.
    unsafe { library.get(name.as_bytes()) }.map_err(|_| {
        Error::device(format!("{LIBRARY} has no {name}"), "install an NVIDIA driver from 525 on, or use --device cpu")
    })
}

/// The error for a driver without devices, most often due to an empty CUDA_VISIBLE_DEVICES.
fn hidden() -> Error {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => Error::device(
            format!("the driver shows no GPU while CUDA_VISIBLE_DEVICES is {value:?}"),
            "unset CUDA_VISIBLE_DEVICES or name a device in it, or use --device cpu",
        ),
        Err(_) => Error::device("the driver shows no GPU", "check nvidia-smi, or use --device cpu"),
    }
}

fn check(library: &Library, call: &str, status: c_int) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: cuGetErrorName stores a pointer to a static string, or leaves null.
    let name = unsafe {
        if let Ok(name) = library.get::<unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int>(b"cuGetErrorName\0") {
            name(status, &mut text);
        }
        if text.is_null() { format!("error {status}") } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(Error::device(format!("{call} failed: {name}"), "check that nvidia-smi works, or use --device cpu"))
}

/// The kernel module's version, if the system shows it.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version")
        .or_else(|_| std::fs::read_to_string("/proc/driver/nvidia/version"))
        .ok()?;
    text.split_whitespace()
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detection_gives_a_reason_on_every_machine() {
        let detection = detect();
        assert!(!detection.reason.is_empty() && !detection.reason.contains('\n'));
        assert_eq!(detection.available, detection.devices.iter().any(DeviceInfo::is_usable));
        // An impossible index is refused with a typed error, with or without a driver.
        let refused = device(usize::MAX).unwrap_err();
        assert!(!refused.hint.is_empty());
    }
}
