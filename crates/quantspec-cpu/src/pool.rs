//! A fixed pool of threads: every dispatch runs one closure once per thread and ends when all are done.
//!
//! The caller is thread 0; the workers spin on an epoch for a moment and then park. Work is split into items whose results do
//! not depend on the thread: by thread index ([`share`]), or with work stealing ([`WorkQueues`]). The caller also runs the
//! share of a worker that has not started, since another program may occupy that worker's core.

use crate::dispatch::{Prefetch, fetch_far};
use quantspec_core::{Error, Result};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize};
use std::thread::JoinHandle;
use std::time::Duration;

/// Spins before a worker parks. A PAUSE takes 40 to 140 cycles, so this is 100 to 500 µs: longer than the gap between two
/// operations of a token.
const SPINS: u32 = 10_000;

/// Spins of the caller before it yields, and yields before it sleeps, about 200 µs in total. A preempted worker may need the
/// caller's core, and the system moves a thread to a core whose own thread sleeps, not to one that yields.
const CALLER_SPINS: u32 = 2000;
const CALLER_YIELDS: u32 = 300;

/// Sleep of the caller between two checks; a preempted worker resumes after milliseconds.
const CALLER_SLEEP: Duration = Duration::from_micros(20);

/// Most bytes that a waiting thread prefetches of its next operands: half of a small L2 cache. Half as much gains less, and so
/// does three times as much.
const NEXT_BYTES: usize = 256 << 10;

/// Bytes prefetched between two checks of the wait condition.
const WAIT_BYTES: usize = 512;

/// Elements of elementwise work that take about as long as waking the pool on a busy machine (some microseconds).
const SMALL: usize = 32_768;

fn panicked() -> Error {
    Error::internal("a kernel panicked; the line above says where")
}

/// A value alone on its cache lines; lines are fetched in pairs.
#[repr(align(128))]
struct Line<T>(T);

/// Memory that a thread is expected to read next. Start and length may be from different updates, as they only steer
/// prefetching.
#[derive(Default)]
struct Upcoming {
    start: AtomicPtr<u8>,
    bytes: AtomicUsize,
}

/// A waiting loop of a thread.
struct Wait<'a> {
    next: &'a Upcoming,
    prefetched: usize,
}

impl Wait<'_> {
    /// Prefetches some lines of the next operands, or pauses if all are fetched.
    fn step(&mut self) {
        if self.prefetched < self.next.bytes.load(Relaxed) {
            let at = self.next.start.load(Relaxed).wrapping_add(self.prefetched);
            for line in (0..WAIT_BYTES).step_by(64) {
                fetch_far(at.wrapping_add(line));
            }
            self.prefetched += WAIT_BYTES;
        } else {
            std::hint::spin_loop();
        }
    }
}

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Number of dispatches. The caller writes it after `job`.
    epoch: Line<AtomicU64>,
    /// Workers whose share of the dispatch is not done.
    left: Line<AtomicUsize>,
    /// A worker's closure panicked.
    panicked: AtomicBool,
    stop: AtomicBool,
    asleep: Vec<Line<AtomicBool>>,
    /// Per worker, the last dispatch whose share was claimed, by the worker or by the caller.
    begun: Vec<Line<AtomicU64>>,
    /// Per thread, the memory it is expected to read next.
    next: Vec<Line<Upcoming>>,
    /// Spins before a worker parks: [`SPINS`], or 0 if threads outnumber processors, as a spinning thread then blocks a
    /// working one.
    spins: u32,
    job: UnsafeCell<Option<Job>>,
}
// SAFETY: the caller writes `job` only while no worker runs a share (`left` is 0). Workers read it only after they saw the
// epoch that followed the write and claimed their share, which the caller waits for.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only during a dispatch, and its closure is `Sync`.
unsafe impl Send for Shared {}

impl Shared {
    /// Returns true if the caller of this function claimed the worker's share of the dispatch; it must then run it.
    fn begins(&self, thread: usize, epoch: u64) -> bool {
        let begun = &self.begun[thread - 1].0;
        // A plain load first keeps the line shared if the share is already claimed.
        begun.load(Relaxed) == epoch - 1 && begun.compare_exchange(epoch - 1, epoch, SeqCst, Relaxed).is_ok()
    }
}

/// A fixed pool of threads; see the module's documentation.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// The process that started the workers; a forked child has none.
    process: u32,
    /// One thread dispatches at a time: a pool is not `Sync`, so no closure can dispatch inside a dispatch.
    one_caller: PhantomData<Cell<()>>,
}

impl Pool {
    /// A pool of `threads` threads, including the caller.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::DoesNotFit`] if the system cannot start the threads.
    pub(crate) fn new(threads: usize) -> Result<Pool> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            spins: if threads > processors { 0 } else { SPINS },
            epoch: Line(AtomicU64::new(0)),
            left: Line(AtomicUsize::new(0)),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: (1..threads).map(|_| Line(AtomicBool::new(false))).collect(),
            begun: (1..threads).map(|_| Line(AtomicU64::new(0))).collect(),
            next: (0..threads).map(|_| Line(Upcoming::default())).collect(),
            job: UnsafeCell::new(None),
        });
        let process = std::process::id();
        let mut pool = Pool { shared: shared.clone(), workers: Vec::new(), process, one_caller: PhantomData };
        for thread in 1..threads {
            let shared = shared.clone();
            let worker = std::thread::Builder::new()
                .name(format!("quantspec-{thread}"))
                .spawn(move || work(&shared, thread))
                .map_err(|error| {
                    Error::does_not_fit(
                        format!("the system starts no more than {thread} threads: {error}"),
                        "ask for fewer with --threads",
                    )
                })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Sets the memory that each thread reads first after the next dispatches (`first(thread)`); waiting threads prefetch it.
    pub(crate) fn will_read<'a>(&self, first: impl Fn(usize) -> &'a [u8]) {
        if Prefetch::choose(false).is_none() {
            return;
        }
        for (thread, next) in self.shared.next.iter().enumerate() {
            let first = first(thread);
            next.0.start.store(first.as_ptr().cast_mut(), Relaxed);
            next.0.bytes.store(first.len().min(NEXT_BYTES), Relaxed);
        }
    }

    /// Number of threads to use for work on `numbers` numbers. Below [`SMALL`] the caller alone is faster.
    pub(crate) fn team(&self, numbers: usize) -> usize {
        if numbers < SMALL { 1 } else { self.threads() }
    }

    /// Calls `f(0)` if `team` is 1, else `f(thread)` on every thread.
    ///
    /// # Errors
    /// As [`Pool::run`].
    pub(crate) fn run_team(&self, team: usize, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        if team == 1 {
            return catch_unwind(AssertUnwindSafe(|| f(0))).map_err(|_| panicked());
        }
        self.run(f)
    }

    /// Calls `f(thread)` once on every thread and returns when all are done.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if `f` panicked on any thread.
    pub(crate) fn run(&self, f: &(dyn Fn(usize) + Sync)) -> Result<()> {
        let shared = &*self.shared;
        let mut epoch = 0;
        if !self.workers.is_empty() {
            // SAFETY: no worker runs a share, so none reads `job`. The borrow, whose lifetime is erased, outlives every use:
            // this function does not return or unwind before `left` is zero.
            unsafe { *shared.job.get() = Some(std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(f)) };
            shared.left.0.store(self.workers.len(), Relaxed);
            epoch = shared.epoch.0.fetch_add(1, SeqCst) + 1;
            for (worker, asleep) in self.workers.iter().zip(&shared.asleep) {
                if asleep.0.load(SeqCst) {
                    worker.thread().unpark();
                }
            }
        }
        let mut mine = catch_unwind(AssertUnwindSafe(|| f(0)));
        if shared.left.0.load(Acquire) != 0 {
            for thread in 1..self.threads() {
                if shared.begins(thread, epoch) {
                    mine = mine.and(catch_unwind(AssertUnwindSafe(|| f(thread))));
                    shared.left.0.fetch_sub(1, Relaxed);
                }
            }
        }
        let (mut spins, mut wait) = (0, Wait { next: &shared.next[0].0, prefetched: 0 });
        while shared.left.0.load(Acquire) != 0 {
            if spins < CALLER_SPINS {
                spins += 1;
                wait.step();
            } else if spins < CALLER_SPINS + CALLER_YIELDS {
                spins += 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(CALLER_SLEEP);
            }
        }
        if shared.panicked.swap(false, Relaxed) || mine.is_err() {
            return Err(panicked());
        }
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.epoch.0.fetch_add(1, SeqCst);
        for worker in self.workers.drain(..) {
            if self.process != std::process::id() {
                std::mem::forget(worker);
                continue;
            }
            worker.thread().unpark();
            // A worker catches panics of closures, so it ends normally.
            let _ = worker.join();
        }
    }
}

fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    loop {
        let (mut spins, mut wait) = (0, Wait { next: &shared.next[thread].0, prefetched: 0 });
        while shared.epoch.0.load(SeqCst) == seen {
            if spins < shared.spins {
                spins += 1;
                wait.step();
                continue;
            }
            // Announced before the epoch is read again, so the caller sees the announcement or this thread sees the epoch.
            let asleep = &shared.asleep[thread - 1].0;
            asleep.store(true, SeqCst);
            if shared.epoch.0.load(SeqCst) == seen {
                std::thread::park();
            }
            asleep.store(false, SeqCst);
        }
        // The caller ran this thread's share of any dispatch in between.
        seen = shared.epoch.0.load(SeqCst);
        if shared.stop.load(SeqCst) {
            return;
        }
        if !shared.begins(thread, seen) {
            continue;
        }
        // SAFETY: this thread claimed its share of the dispatch `seen`, so `job` holds that dispatch's closure, which lives
        // until `left` is zero.
        let job = unsafe { (*shared.job.get()).map(|job| &*job) };
        if let Some(job) = job
            && catch_unwind(AssertUnwindSafe(|| job(thread))).is_err()
        {
            shared.panicked.store(true, Relaxed);
        }
        shared.left.0.fetch_sub(1, Release);
    }
}

/// Items of a dispatch with work stealing, so that a slow or busy core does not delay the others. Each thread takes from the
/// front of its own run of adjacent items, in address order. When that is empty it takes from the back of the longest run.
pub(crate) struct WorkQueues {
    /// Each thread's remaining items: the first in the low 32 bits, the end in the high ones.
    left: Vec<Line<AtomicU64>>,
}

impl WorkQueues {
    /// Splits `0..n` into runs as even as possible.
    pub(crate) fn new(n: usize, threads: usize) -> WorkQueues {
        WorkQueues::of((0..threads).map(|thread| share(n, thread, threads)))
    }

    /// These runs; numbers below 2³².
    pub(crate) fn of(runs: impl Iterator<Item = Range<usize>>) -> WorkQueues {
        WorkQueues { left: runs.map(|run| Line(AtomicU64::new(pack(run.start as u64, run.end as u64)))).collect() }
    }

    /// The next item of `thread`; None when none is left.
    pub(crate) fn take(&self, thread: usize) -> Option<usize> {
        // Operands were written before the dispatch began, and results are read after it, so relaxed ordering suffices.
        let mine = self.left[thread].0.fetch_update(Relaxed, Relaxed, |left| {
            let (start, end) = unpack(left);
            (start < end).then(|| pack(start + 1, end))
        });
        if let Ok(left) = mine {
            return Some(unpack(left).0 as usize);
        }
        loop {
            let count = |left: u64| unpack(left).1.saturating_sub(unpack(left).0);
            let (victim, left) =
                self.left.iter().map(|left| (&left.0, left.0.load(Relaxed))).max_by_key(|(_, left)| count(*left))?;
            if count(left) == 0 {
                return None;
            }
            let (start, end) = unpack(left);
            if victim.compare_exchange(left, pack(start, end - 1), Relaxed, Relaxed).is_ok() {
                return Some(end as usize - 1);
            }
        }
    }
}

const fn pack(start: u64, end: u64) -> u64 {
    end << 32 | start
}

const fn unpack(left: u64) -> (u64, u64) {
    (left & 0xffff_ffff, left >> 32)
}

/// The share of `0..n` that belongs to `thread` of `threads`.
pub(crate) fn share(n: usize, thread: usize, threads: usize) -> Range<usize> {
    n * thread / threads..n * (thread + 1) / threads
}

/// The items of `thread` of `threads` if item i costs `cost(i)`: adjacent, of about equal cost per thread.
pub(crate) fn share_by_cost(n: usize, thread: usize, threads: usize, cost: impl Fn(usize) -> usize) -> Range<usize> {
    let total: usize = (0..n).map(&cost).sum();
    // An item belongs to the thread whose share contains the item's middle.
    let (mut before, mut start, mut end) = (0, n, n);
    for i in 0..n {
        let cost = cost(i);
        let owner = if total == 0 { 0 } else { ((2 * before + cost) * threads / (2 * total)).min(threads - 1) };
        before += cost;
        if owner >= thread && start == n {
            start = i;
        }
        if owner > thread {
            end = i;
            break;
        }
    }
    start.min(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_thread_runs_once_per_dispatch() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for round in 0..300 {
                if round == 150 {
                    std::thread::sleep(Duration::from_millis(20)); // workers park
                }
                pool.run(&|thread| {
                    counts[thread].fetch_add(1, Relaxed);
                })
                .unwrap();
                assert!(counts.iter().all(|count| count.load(Relaxed) == round + 1));
            }
        }
    }

    #[test]
    fn a_worker_that_does_not_start_is_not_waited_for() {
        // More threads than processors: sleeping workers start late, and the caller runs their shares.
        let threads = 3 * std::thread::available_parallelism().map_or(1, usize::from) + 1;
        let (pool, caller) = (Pool::new(threads).unwrap(), std::thread::current().id());
        let (counts, taken) = ((0..threads).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>(), AtomicUsize::new(0));
        for round in 0..200 {
            pool.run(&|thread| {
                counts[thread].fetch_add(1, Relaxed);
                taken.fetch_add(usize::from(thread > 0 && std::thread::current().id() == caller), Relaxed);
            })
            .unwrap();
            assert!(counts.iter().all(|count| count.load(Relaxed) == round + 1));
        }
        assert!(taken.load(Relaxed) > 0);
    }

    #[test]
    fn a_panic_on_any_thread_is_an_error_and_the_pool_continues() {
        let pool = Pool::new(3).unwrap();
        for bad in 0..3 {
            let error = pool.run(&|thread| assert!(thread != bad, "expected by this test")).unwrap_err();
            assert_eq!(error.kind, quantspec_core::ErrorKind::Internal);
            pool.run(&|_| ()).unwrap();
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        for n in [0, 1, 2, 7, 64, 1000] {
            for threads in [1, 2, 3, 16] {
                for cost in [|_| 1, |i: usize| i, |i: usize| if i == 3 { 1000 } else { 1 }, |_| 0] {
                    let shares: Vec<_> = (0..threads).map(|t| share_by_cost(n, t, threads, cost)).collect();
                    let seen: Vec<usize> = shares.into_iter().flatten().collect();
                    assert_eq!(seen, (0..n).collect::<Vec<_>>(), "{n} items on {threads} threads");
                }
                let seen: Vec<usize> = (0..threads).flat_map(|t| share(n, t, threads)).collect();
                assert_eq!(seen, (0..n).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn every_item_is_dealt_once_in_order_and_a_thread_that_is_done_helps() {
        for (n, threads) in [(0, 2), (1, 3), (7, 2), (100, 3)] {
            let work = WorkQueues::new(n, threads);
            // A single thread takes its own run upwards, then the others' items.
            let taken: Vec<usize> = std::iter::from_fn(|| work.take(threads - 1)).collect();
            let own = share(n, threads - 1, threads);
            assert!(taken.iter().copied().take(own.len()).eq(own));
            let mut all = taken;
            all.sort_unstable();
            assert!(all.into_iter().eq(0..n) && work.take(0).is_none());
        }
        let pool = Pool::new(4).unwrap();
        let (work, counts) = (WorkQueues::new(5000, 4), (0..5000).map(|_| AtomicUsize::new(0)).collect::<Vec<_>>());
        pool.run(&|thread| {
            while let Some(item) = work.take(thread) {
                counts[item].fetch_add(1, Relaxed);
            }
        })
        .unwrap();
        assert!(counts.iter().all(|count| count.load(Relaxed) == 1));
    }

    #[test]
    fn costs_are_shared_evenly() {
        let cost = |i: usize| i + 1;
        let shares: Vec<usize> = (0..4).map(|t| share_by_cost(1000, t, 4, cost).map(cost).sum()).collect();
        let total: usize = shares.iter().sum();
        assert!(shares.iter().all(|share| share.abs_diff(total / 4) < 2000), "{shares:?}");
    }
}
