//! Processes on a CPU of their own: started, watched, ended.

use std::collections::HashMap;
use std::fs;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setpriority_process, setrlimit,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::Result;

/// Where the measured proxy runs, and nothing else.
pub(crate) const PROXY: usize = 0;
/// Where load, upstream and Redis run.
pub(crate) const LOAD: usize = 1;

/// Nice value. All children have it, so that none of them is measured unlike another.
const PRIORITY: i32 = -15;
const SESSION: &str = "/proc/self/autogroup";

/// How long a process may take to end when it is asked to.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has this thread, and all that it starts from now on, run on `cpu` alone.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).map_err(|cause| {
        format!("this needs CPUs {PROXY} and {LOAD}, and {cpu} cannot be had: {cause}").into()
    })
}

/// While it lives, this process, what it starts and the rest of its session come before all other work of
/// the machine.
pub(crate) struct First;

impl First {
    pub(crate) fn take() -> Result<Self> {
        setpriority_process(None, PRIORITY).map_err(|cause| format!("--first is not allowed: {cause}"))?;
        // Where sessions share the CPU, what stands here counts between them, and what was just set only within.
        let _ = fs::write(SESSION, PRIORITY.to_string()); // a kernel may be without
        Ok(Self)
    }
}

impl Drop for First {
    fn drop(&mut self) {
        let _ = fs::write(SESSION, "0"); // the session is the user's shell
    }
}

/// While it lives, these processes and all that they start run as soon as they can, whatever else does. For
/// parts that measure waiting and use little CPU: at full load they would stop the machine.
pub(crate) struct Urgent(Vec<u32>);

impl Urgent {
    pub(crate) fn take(processes: Vec<u32>) -> Result<Self> {
        let urgent = Self(processes); // so that a failure undoes the half of it
        for process in &urgent.0 {
            change_class(*process, &["--rr", "--pid", "5"])?;
        }
        Ok(urgent)
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        for process in &self.0 {
            let _ = change_class(*process, &["--other", "--pid", "0"]); // it may have ended
        }
    }
}

fn change_class(process: u32, how: &[&str]) -> Result<()> {
    let done = Command::new("chrt").args(how).arg(process.to_string()).status();
    match done.map_err(|cause| format!("chrt, of the package util-linux: {cause}"))? {
        done if done.success() => Ok(()),
        done => Err(format!("chrt, for --first: {done}").into()),
    }
}

/// Takes as many file descriptors as there may be, and says how many; children have the same.
pub(crate) fn take_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, most); // else it stays as it is, and so it is told
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A process and its children. Ends with this value.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    born: Instant,
}

impl Running {
    /// Starts it on `cpu`: a child inherits where the thread runs that starts it.
    pub(crate) fn start(command: &mut Command, cpu: usize) -> Result<Self> {
        pin(cpu)?;
        let born = Instant::now();
        let child = command.spawn();
        pin(LOAD)?;
        let child = child
            .map_err(|cause| format!("{} could not be started: {cause}", command.get_program().display()))?;
        Ok(Self { child, born })
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// How long ago it was started.
    pub(crate) fn age(&self) -> Duration {
        self.born.elapsed()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// The CPU time of all its threads and of its children's, in µs.
    pub(crate) fn cpu(&self) -> f64 {
        cpu_of(&self.tree())
    }

    /// Its memory and its children's in KiB, what is shared counted in parts. Only its owner's superuser may
    /// read that of a process that hides its memory, as lessor does; for others it is the resident set.
    pub(crate) fn memory(&self) -> f64 {
        let kib = |pid: u32| {
            field(&format!("/proc/{pid}/smaps_rollup"), "Pss:")
                .or_else(|| field(&format!("/proc/{pid}/status"), "VmRSS:"))
        };
        self.tree().into_iter().filter_map(kib).sum()
    }

    /// It and all that come from it, parents first.
    fn tree(&self) -> Vec<u32> {
        let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue }; // it has ended
            // `pid (any name) state parent …`
            let parent =
                stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
            if let Some(parent) = parent {
                children.entry(parent).or_default().push(pid);
            }
        }
        let mut tree = vec![self.child.id()];
        let mut next = 0;
        while let Some(pid) = tree.get(next) {
            tree.extend(children.remove(pid).unwrap_or_default());
            next += 1;
        }
        tree
    }
}

/// The CPU time of all threads of these processes, in µs.
pub(crate) fn cpu_of(processes: &[u32]) -> f64 {
    let tasks = processes.iter().flat_map(|pid| {
        fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().filter_map(|task| {
            let stat = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            stat.split(' ').next()?.parse::<f64>().ok()
        })
    });
    tasks.sum::<f64>() / 1e3
}

fn field(path: &str, name: &str) -> Option<f64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())
}

impl Drop for Running {
    fn drop(&mut self) {
        let tree = self.tree();
        let tell = |pid: u32, signal| {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, signal); // it may have ended by itself
            }
        };
        if self.ended().is_none() {
            tell(self.child.id(), Signal::TERM);
            let asked = Instant::now();
            while self.ended().is_none() && asked.elapsed() < PATIENCE {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        if self.ended().is_none() {
            for pid in tree {
                tell(pid, Signal::KILL);
            }
        }
        let _ = self.child.wait();
    }
}
