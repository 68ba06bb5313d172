//! Ranks that have a GPU each, connected by NVIDIA's NCCL, which is loaded when the first world is joined.
//!
//! All ranks meet in a [`store`](crate::store): it hands out NCCL's ids, and is where a failure is told and a silent rank
//! found out. Each group is a communicator of NCCL's with a stream and a thread of its own. What is started waits on the
//! device for what it needs, and what comes after waits on the device for its result: the host goes on. Tensors of the CPU
//! are carried over the GPU. The groups of a device launch in the order of the calls, so that ranks which call their groups in
//! one order launch in one order. NCCL connects two ranks in the first launch that needs it: such a launch waits for the other
//! rank's, and later calls of this rank, to any group, wait for it.
//!
//! Where this differs from the other engines: NCCL adds in its own order, the same on all ranks but not that of the ranks;
//! collectives that do not fit together are found out by the time-out; and that counts for an operation as a whole, from when
//! this rank's part of it was ready. A tensor of another dtype or shape than its receiver expects is found out by the
//! description that travels with it, after the exchange or while it hangs, so that no exchange waits for a description.
//! Sums of f16 and bf16 are taken in f32, in tensors twice as large.

mod api;
mod communicator;
mod description;
mod group;
mod launch_order;
mod memory;
mod worker;

use std::sync::Arc;
use std::time::Instant;

use candle_core::{CudaDevice, Device};

use crate::call::Journal;
use crate::deadline::deadline;
use crate::herald::{About, Herald};
use crate::staff::Staff;
use crate::store::{self, Client, Server};
use crate::{Error, Options, Result, World};
use group::Group;
use worker::{Rank, Worker};

/// Joins the world of `size` ranks that meet in `store`, as rank `rank` with the GPU `device`; returns when all have joined,
/// and fails if they have not within `options.timeout`. One rank is a world, too. `host` is the store, if this rank has it:
/// it is kept until the others have left.
///
/// Each run, and each restart of it, needs keys of its own: see [`Client::with_prefix`].
pub fn join(
    store: &Client,
    rank: usize,
    size: usize,
    device: &Device,
    host: Option<Server>,
    options: Options,
) -> Result<World> {
    let refuse = |why: String| Error::Join { rank, size, why };
    let Device::Cuda(cuda) = device else {
        return Err(refuse(format!("NCCL connects GPUs, and this rank computes on {:?}", device.location())));
    };
    if rank >= size {
        return Err(refuse("there is no such rank".to_owned()));
    }
    api::nccl().map_err(&refuse)?;
    let meeting =
        Meeting { store: store.with_prefix("nccl"), rank, size, deadline: deadline(options.timeout), options };
    let own = this_process(rank, size, cuda).map_err(&refuse)?;
    let others = meeting.meet(&own)?;
    let herald = Arc::new(Herald::start(&meeting.store, rank, others, host, options.timeout)?);
    let (staff, journal) = (Arc::<Staff>::default(), Journal::new(options.record));
    let (everyone, order) = ((0..size).collect::<Vec<_>>(), Arc::default());
    let shared = Rank { herald: Arc::clone(&herald), device: cuda.clone(), order };
    let worker = Worker::open(&shared, "world", "world".into(), &everyone);
    let worker = worker.map_err(|trouble| herald.unconnected(trouble))?;
    let group = Group::new(worker, device, journal.clone(), Arc::clone(&staff))?;
    Ok(World::of(Arc::new(group), herald, options.timeout, staff, journal))
}

fn this_process(rank: usize, size: usize, device: &CudaDevice) -> Result<About, String> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let uuid = device.cuda_stream().context().uuid().map_err(|error| format!("name its GPU: {error}"))?;
    let device = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    Ok(About { rank, size, host, pid: std::process::id(), device })
}

/// The ranks coming together in the store.
struct Meeting {
    store: Client,
    rank: usize,
    size: usize,
    deadline: Instant,
    options: Options,
}

impl Meeting {
    /// Returns what all ranks say about themselves.
    fn meet(&self, own: &About) -> Result<Vec<About>> {
        if self.store.add(&format!("{}/claims", self.rank), 1)? > 1 {
            return Err(self.refuse("another process has joined as this rank".to_owned()));
        }
        self.store.set(&key(self.rank), &own.encode())?;
        let others = (0..self.size).map(|rank| self.await_one(rank)).collect::<Result<Vec<_>>>()?;
        self.check(&others)?;
        Ok(others)
    }

    fn await_one(&self, rank: usize) -> Result<About> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.store.wait_for(&[&key(rank)], left) {
            Ok(()) => {}
            Err(store::Error::Timeout { .. }) => {
                let (absent, timeout) = (vec![rank], self.options.timeout);
                return Err(Error::Absent { rank: self.rank, size: self.size, absent, timeout });
            }
            Err(error) => return Err(error.into()),
        }
        let about = About::decode(rank, &self.store.get(&key(rank))?);
        about.ok_or_else(|| self.refuse(format!("rank {rank} runs another version of this program")))
    }

    fn check(&self, others: &[About]) -> Result<()> {
        if let Some(other) = others.iter().find(|other| other.size != self.size) {
            let (other, other_size) = (other.rank, other.size);
            return Err(Error::OtherSize { rank: self.rank, size: self.size, other, other_size });
        }
        let twice = others.iter().enumerate().find_map(|(at, one)| {
            let same = others[..at].iter().find(|other| other.device == one.device)?;
            Some((same, one))
        });
        match twice {
            None => Ok(()),
            Some((one, other)) => Err(self.refuse(format!(
                "{one} and {other} have the same GPU, and NCCL wants one for each; set ddp_backend: staged to share it"
            ))),
        }
    }

    fn refuse(&self, why: String) -> Error {
        Error::Join { rank: self.rank, size: self.size, why }
    }
}

fn key(rank: usize) -> String {
    format!("{rank}/about")
}
