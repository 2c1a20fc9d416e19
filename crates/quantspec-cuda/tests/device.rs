//! The device layer: refusals and their errors, use after a refusal, threads, several GPUs, and memory accounting.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::print_stderr, reason = "a skipped test must say so, and figures are worth seeing")]

mod gpu;
#[path = "gpu/model.rs"]
mod small;

use gpu::{Random, device, poisoned};
use quantspec_core::config::{Pages, Planes, View, Weights};
use quantspec_core::policy::Policy;
use quantspec_core::sample::{Accept, Sampler};
use quantspec_core::{Error, ErrorKind, Result};
use quantspec_cuda::device::{Arg, Buffer, Copies, Device, Launch};
use quantspec_cuda::{CudaBackend, detect, plan};
use quantspec_model::backend::{Backend, DraftConfig, Hooks, Memory, Options};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft::SelfQuantised;
use quantspec_model::engine::{Engine, Method};
use small::{checkpoints, options, prompt};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

/// Serialises the tests of this file: some measure free memory.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Opens a device by its index, with the images that `device()` uses.
fn open(index: usize) -> Result<Arc<Device>> {
    if std::env::var_os("QUANTSPEC_TEST_PTX").is_some() { Device::open_ptx(index) } else { Device::open(index) }
}

/// Copies random bytes to the device and back, and runs a kernel.
fn works(device: &Arc<Device>) {
    let mut random = Random(4);
    let bytes: Vec<u64> = (0..1 << 17).map(|_| random.next()).collect();
    let buffer = device.copied(&bytes).unwrap();
    assert!(buffer.read::<u64>(0, bytes.len()).unwrap() == bytes, "what was written is not what is read");
    let halves: Vec<half::f16> = (0..1000u16).map(|i| half::f16::from_f32(f32::from(i))).collect();
    let (from, to) = (device.copied(&halves).unwrap(), poisoned(device, 4000));
    launch(device, &from, &to, [4, 1, 1], 256).unwrap();
    let expected: Vec<f32> = (0..1000u16).map(f32::from).collect();
    assert_eq!(to.read::<f32>(0, 1000).unwrap(), expected);
}

/// Kernel `widen` over the elements of `to`.
fn launch(device: &Arc<Device>, from: &Buffer, to: &Buffer, grid: [u32; 3], block: u32) -> Result<()> {
    let kernel = device.kernel("widen", 0)?;
    let arguments = [Arg::from(from), Arg::from(to), Arg::Long(to.bytes() as u64 / 4)];
    // SAFETY: the arguments documented in kernels/elementwise.cu, and the kernel stays within `to`.
    unsafe { device.launch(kernel, Launch { grid, block, shared: 0, overlap: false }, &arguments)? };
    device.synchronize()
}

/// The error of an operation that must fail.
fn refused<T>(result: Result<T>, kind: ErrorKind) -> Error {
    let error = result.err().expect("it must be refused");
    assert_eq!(error.kind, kind, "{}", error.message);
    assert!(!error.hint.is_empty(), "{}", error.message);
    error
}

#[test]
fn a_launch_that_fails_is_named() {
    let _alone = alone();
    let Some(device) = device() else { return };
    let (from, to) = (device.zeroed(2 * 6 * 2048).unwrap(), poisoned(&device, 4 * 6 * 2048));
    let error = refused(launch(&device, &from, &to, [3, 2, 1], 2048), ErrorKind::Device);
    for part in ["widen", "3 × 2 × 1", "2048 threads", "CUDA_ERROR"] {
        assert!(error.message.contains(part), "{part} is not in: {}", error.message);
    }
    // No launch ran, and the next one works.
    assert!(to.read::<u8>(0, to.bytes()).unwrap().iter().all(|&byte| byte == 0xff));
    works(&device);
    refused(device.kernel("no_such_kernel", 0), ErrorKind::Internal);
    refused(device.kernel("widen", 1 << 30), ErrorKind::Device);
    works(&device);
}

/// The bytes in a refused allocation's message: requested, free, and total.
fn named(error: &Error) -> [usize; 3] {
    let number = |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok());
    // A GPU's name may contain digits, so only the text after it is parsed.
    let numbers = error.message.rsplit(": ").next().unwrap();
    let total = numbers.split(" of ").nth(1).and_then(number);
    match (number(&error.message), number(numbers), total) {
        (Some(asked), Some(free), Some(total)) => [asked, free, total],
        _ => panic!("no three numbers in: {}", error.message),
    }
}

#[test]
fn allocations_that_do_not_fit_are_refused_with_their_numbers() {
    let _alone = alone();
    let Some(device) = device() else { return };
    let (free, total) = device.memory().unwrap();
    assert!(0 < free && free <= total, "{free} of {total}");
    assert!((total as u64).abs_diff(device.info.memory_bytes) < device.info.memory_bytes / 8, "{total}");
    for bytes in [usize::MAX / 2, total + (1 << 30), 1 << 50] {
        let error = refused(device.allocate(bytes), ErrorKind::DoesNotFit);
        let [asked, named_free, named_total] = named(&error);
        assert_eq!((asked, named_total), (bytes, total), "{}", error.message);
        // Nothing else in this process allocates meanwhile.
        assert!(named_free.abs_diff(free) < 64 << 20, "{}, and {free} were", error.message);
        works(&device);
    }
    assert!(device.memory().unwrap().0.abs_diff(free) < 64 << 20);
}

/// Bytes of a model according to its plan.
fn sum(memory: &Memory) -> usize {
    let Memory {
        weights_bytes,
        draft_weights_bytes,
        cache_upper_bytes,
        cache_lower_bytes,
        cache_full_bytes,
        buffer_bytes,
        workspace_bytes,
        host_bytes: _,
    } = *memory;
    let cache = cache_upper_bytes + cache_lower_bytes + cache_full_bytes + buffer_bytes;
    weights_bytes + draft_weights_bytes + cache + workspace_bytes
}

fn load(device: &Arc<Device>, checkpoint: &Checkpoint, options: &Options) -> Result<CudaBackend> {
    CudaBackend::load_on(device, checkpoint, options, Hooks::default())
}

/// Options with which a model's plan is about `bytes`, nearly all of it cache.
fn filling(checkpoint: &Checkpoint, device: &Device, bytes: usize) -> Options {
    let of = |capacity: usize| Options { capacity, prompt_capacity: 512, ..options(512, 1) };
    let planned = |capacity: usize| sum(&plan(checkpoint, &of(capacity), &device.info));
    let (small, large) = (planned(1 << 12), planned(1 << 16));
    let per_token = (large - small) / ((1 << 16) - (1 << 12));
    of((bytes - small.min(bytes)) / per_token + (1 << 12))
}

#[test]
fn a_model_that_does_not_fit_returns_all_memory() {
    let _alone = alone();
    let Some(device) = device() else { return };
    let checkpoint = &checkpoints(&device, 512)[0];
    // Memory that remains allocated after a first load, such as kernel code, is not the model's.
    drop(load(&device, checkpoint, &options(512, 1)).unwrap());
    let (free, total) = device.memory().unwrap();
    // Some of its parts fit.
    let too_long = filling(checkpoint, &device, total + total / 4);
    let error = refused(load(&device, checkpoint, &too_long), ErrorKind::DoesNotFit);
    let [asked, named_free, _] = named(&error);
    assert!(asked > named_free, "{}", error.message);
    let now = device.memory().unwrap().0;
    assert!(now + (16 << 20) >= free, "{free} bytes were free, and {now} are");
    works(&device);
    drop(load(&device, checkpoint, &options(512, 1)).unwrap());
}

#[test]
fn a_model_takes_its_planned_memory_and_returns_it() {
    let _alone = alone();
    let Some(device) = device() else { return };
    let checkpoint = &checkpoints(&device, 512)[0];
    drop(load(&device, checkpoint, &options(512, 1)).unwrap());
    let half = Planes { upper: true, lower: true, full: false };
    let long = filling(checkpoint, &device, 2 << 30);
    for options in
        [options(4000, 3), options(1000, 32), long.clone(), Options { planes: half, rejection: false, ..long }]
    {
        let planned = sum(&plan(checkpoint, &options, &device.info));
        let before = device.memory().unwrap().0;
        let backend = load(&device, checkpoint, &options).unwrap();
        let taken = before.saturating_sub(device.memory().unwrap().0);
        let held = sum(&backend.memory());
        drop(backend);
        let after = device.memory().unwrap().0;
        eprintln!("planned {planned}, held {held}, taken {taken}, left {}", before.saturating_sub(after));
        for (what, bytes) in [("holds", held), ("takes", taken)] {
            assert!(bytes <= planned + planned / 20 + (64 << 20), "it {what} {bytes}, and {planned} were planned");
            // A plan much larger than actual use would refuse models that fit.
            assert!(bytes + planned / 20 + (64 << 20) >= planned, "it {what} {bytes}, and {planned} were planned");
        }
        assert!(after + (16 << 20) >= before, "{before} bytes were free, and {after} are");
    }
}

#[test]
fn accesses_beyond_a_buffer_are_refused_and_change_nothing() {
    let _alone = alone();
    let Some(device) = device() else { return };
    // Between two others of the same size, which the driver may have placed next to it.
    let buffers: Vec<Buffer> = (0..3u8).map(|i| device.copied(&[0x50 + i; 64]).unwrap()).collect();
    let (buffer, other) = (&buffers[1], device.copied(&[9u8; 256]).unwrap());
    let mut pinned = device.pinned(128).unwrap();
    let copies = Copies::new(&device).unwrap();
    pinned.put(0, &[7u8; 128]).unwrap();
    let ten = [1u8; 10];
    let mut refusals = vec![
        buffer.write(55, &ten),
        buffer.write(64, &[1u8]),
        buffer.write(usize::MAX, &ten),
        buffer.write(usize::MAX - 3, &ten),
        buffer.write(0, &[1u8; 65]),
        buffer.write(61, &[1u32]),
        buffer.read::<u8>(0, 65).map(|_| ()),
        buffer.read::<u8>(64, 1).map(|_| ()),
        buffer.read::<u32>(0, 17).map(|_| ()),
        buffer.read::<u32>(61, 1).map(|_| ()),
        buffer.read::<u8>(usize::MAX, 2).map(|_| ()),
        buffer.copy_from(55, &other, 0, 10),
        buffer.copy_from(0, &other, 0, 65),
        buffer.copy_from(usize::MAX, &other, 0, 10),
        buffer.copy_from(0, &other, 250, 10),
        buffer.copy_from(0, &other, usize::MAX, 10),
        buffer.fill_rows(1, 0, 8, 16, 5),
        buffer.fill_rows(1, 57, 8, 8, 1),
        buffer.fill_rows(1, 0, 65, 65, 1),
        buffer.fill_rows(1, usize::MAX, 8, 8, 1),
        buffer.fill_rows(1, 0, 8, usize::MAX, 3),
        buffer.read::<u32>(0, usize::MAX / 2).map(|_| ()),
        // Rows that overlap.
        buffer.fill_rows(1, 0, 9, 8, 2),
        buffer.read_pinned(60, &mut pinned, 5),
        buffer.read_pinned(0, &mut pinned, 65),
        other.read_pinned(0, &mut pinned, 129),
    ];
    // SAFETY: nothing is copied; the memory does not change until the end of the test.
    unsafe {
        refusals.push(buffer.write_pinned(60, &pinned, 0, 5));
        refusals.push(buffer.write_pinned(0, &pinned, 0, 65));
        refusals.push(buffer.write_pinned(0, &pinned, 120, 9));
        refusals.push(buffer.write_pinned(0, &pinned, usize::MAX, 2));
        for (offset, start, bytes) in [(60, 0, 5), (0, 0, 65), (0, 120, 9), (0, usize::MAX, 2), (usize::MAX, 0, 2)] {
            refusals.push(copies.to_device((buffer, offset), (&pinned, start), bytes));
            refusals.push(copies.to_host((buffer, offset), (&pinned, start), bytes));
        }
    }
    refusals.push(pinned.put(120, &[1u64; 2]));
    refusals.push(pinned.put(usize::MAX, &[1u8; 2]));
    for (index, refusal) in refusals.into_iter().enumerate() {
        let error = refused(refusal, ErrorKind::Internal);
        assert!(!error.message.is_empty(), "{index}");
    }
    device.synchronize().unwrap();
    for (i, buffer) in buffers.iter().enumerate() {
        assert_eq!(buffer.read::<u8>(0, 64).unwrap(), [0x50 + i as u8; 64], "buffer {i}");
    }
    assert_eq!(other.read::<u8>(0, 256).unwrap(), [9; 256]);
    assert_eq!(pinned.bytes(), [7; 128]);
    // A write that ends exactly at the buffer's end is accepted.
    buffer.write(54, &ten).unwrap();
    buffer.copy_from(0, &other, 246, 10).unwrap();
    buffer.fill_rows(2, 16, 8, 16, 2).unwrap();
    let expected: Vec<u8> = (0..64)
        .map(|i| match i {
            0..10 => 9,
            16..24 | 32..40 => 2,
            54.. => 1,
            _ => 0x51,
        })
        .collect();
    assert_eq!(buffer.read::<u8>(0, 64).unwrap(), expected);
}

/// Threads write and read their own parts of one buffer concurrently.
#[test]
fn threads_share_a_buffer() {
    const THREADS: usize = 8;
    const WORDS: usize = 40_000;
    let _alone = alone();
    let Some(device) = device() else { return };
    let buffer = poisoned(&device, THREADS * WORDS * 8);
    let words = |thread: usize, turn: usize| -> Vec<u64> {
        let mut random = Random((thread * 100 + turn) as u64);
        (0..WORDS).map(|_| random.next()).collect()
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (buffer, device, words) = (&buffer, &device, &words);
            scope.spawn(move || {
                for turn in 0..20 {
                    let (at, expected) = (thread * WORDS * 8, words(thread, turn));
                    buffer.write(at, &expected).unwrap();
                    // A device-to-device copy in between, through memory that this thread allocates and frees.
                    let copy = device.allocate(WORDS * 8).unwrap();
                    copy.copy_from(0, buffer, at, WORDS * 8).unwrap();
                    assert!(copy.read::<u64>(0, WORDS).unwrap() == expected, "copy of thread {thread}, turn {turn}");
                    assert!(buffer.read::<u64>(at, WORDS).unwrap() == expected, "thread {thread}, turn {turn}");
                }
            });
        }
    });
    for thread in 0..THREADS {
        let found = buffer.read::<u64>(thread * WORDS * 8, WORDS).unwrap();
        assert!(found == words(thread, 19), "thread {thread} at the end");
    }
}

#[test]
fn a_device_that_does_not_exist_is_a_usage_error() {
    let _alone = alone();
    let Some(device) = device() else { return };
    let found = detect();
    assert!(found.available, "{}", found.reason);
    assert_eq!(found.devices[0].name, device.info.name);
    let count = found.devices.len();
    for index in [count, count + 7, usize::MAX] {
        for opened in [Device::open(index), Device::open_ptx(index)] {
            let error = refused(opened, ErrorKind::Usage);
            assert!(error.message.contains(&format!("cuda:{index} ")), "{}", error.message);
            assert!(error.message.ends_with(&format!(" {count}")), "{}", error.message);
        }
    }
    works(&device);
}

const TOKENS: usize = 160;

/// An unfinished sequence on one device: drafts of a replay sampler, which decides many near ties.
struct Session {
    engine: Engine<CudaBackend>,
    slot: usize,
    text: Vec<u32>,
}

impl Session {
    fn new(device: &Arc<Device>, checkpoint: &Checkpoint) -> Session {
        let draft = DraftConfig { weights: Weights::Draft, view: View::Upper, pages: Pages::All };
        let method =
            Method { target: View::Both, drafter: Some(SelfQuantised::boxed(draft)), policy: Policy::fixed(4) };
        let backend = load(device, checkpoint, &options(1000, 1)).unwrap();
        let mut engine = Engine::new(backend, method, 1, 1000, 256);
        let sampler =
            Sampler { temperature: 0.8, top_k: 40, top_p: 0.95, seed: 7, accept: Accept::Replay, ..Sampler::greedy() };
        let slot = engine.add(&prompt(checkpoint.config().vocab, 700, 2), sampler, TOKENS).unwrap();
        let text = vec![engine.prefill(slot, &mut |_, _| {}).unwrap()];
        Session { engine, slot, text }
    }

    /// A round, unless the text is complete.
    fn round(&mut self) {
        let left = TOKENS - self.text.len();
        if left > 0 {
            self.engine.draft(&[(self.slot, 4.min(left - 1))]).unwrap();
            self.text.extend(self.engine.verify().unwrap().remove(0).tokens);
        }
    }

    fn finished(&self) -> bool {
        self.text.len() == TOKENS
    }

    fn whole(mut self) -> Vec<u32> {
        while !self.finished() {
            self.round();
        }
        self.text
    }
}

#[test]
fn two_devices_give_the_same_tokens_from_any_thread() {
    let _alone = alone();
    let Some(first) = device() else { return };
    let found = detect().devices;
    let kind = |index: usize| (&found[index].name, &found[index].compute_capability);
    // Splits of sums depend on the device, so only devices of the same kind agree.
    let Some(index) = (1..found.len()).find(|&index| kind(index) == kind(0)) else {
        eprintln!("SKIPPED: the driver shows {} devices, and only one of the first one's kind", found.len());
        return;
    };
    let devices = [first, open(index).unwrap()];
    let checkpoint = &checkpoints(&devices[0], 1000)[0];
    let session = |index: usize| Session::new(&devices[index], checkpoint);
    let expected = session(0).whole();
    assert_eq!(expected.len(), TOKENS);
    assert_eq!(session(1).whole(), expected, "on the second device");

    // One thread drives both in turn.
    let mut both = [session(0), session(1)];
    while both.iter().any(|session| !session.finished()) {
        both.iter_mut().for_each(Session::round);
    }
    let texts = both.map(|session| session.text);
    assert!(texts.iter().all(|text| *text == expected), "alternating: {texts:?}, and not {expected:?}");

    // Two threads swap their sessions after every third round, so each device is used from both threads. A round emits at
    // least one token.
    let drive = |mut session: Session, to: Sender<Session>, from: Receiver<Session>| -> Vec<u32> {
        for _ in 0..TOKENS.div_ceil(3) {
            (0..3).for_each(|_| session.round());
            to.send(session).unwrap();
            session = from.recv().unwrap();
        }
        session.text
    };
    let (to_first, of_first) = channel();
    let (to_second, of_second) = channel();
    let both = [0, 1].map(session);
    let texts = std::thread::scope(|scope| {
        let [first, second] = both;
        let threads = [
            scope.spawn(move || drive(first, to_second, of_first)),
            scope.spawn(move || drive(second, to_first, of_second)),
        ];
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(texts.iter().all(|text| *text == expected), "swapped between threads: {texts:?}, and not {expected:?}");

    // An allocation on the second device takes no memory of the first.
    let before = devices.each_ref().map(|device| device.memory().unwrap().0);
    let buffer = poisoned(&devices[1], 512 << 20);
    let after = devices.each_ref().map(|device| device.memory().unwrap().0);
    drop(buffer);
    assert!(before[0].abs_diff(after[0]) < 64 << 20, "{before:?} {after:?}");
    assert!(before[1].saturating_sub(after[1]) >= 512 << 20, "{before:?} {after:?}");
    devices.iter().for_each(works);
}
