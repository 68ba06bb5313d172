//! Tensors of any device over a group that only takes those of the CPU: each goes through the host's memory.
//!
//! For correctness, not for speed: it lets several ranks share one GPU, which NCCL refuses. What is sent is copied to the
//! host when an operation is started, which waits for the device; what is received goes up when it is waited for.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::{Collective, Pending, Recv, Reduce, Result};

/// A group that takes tensors of any device. A result lies where the tensor lay that it was called with; what comes from
/// another rank without one lies on the group's own device.
pub struct Staged {
    group: Arc<dyn Collective>,
    device: Device,
    route: Arc<dyn Route>,
}

impl Staged {
    /// Makes one over `group`, which takes tensors of the CPU.
    pub fn new(group: Arc<dyn Collective>, device: &Device) -> Self {
        Self { group, device: device.clone(), route: Arc::new(Copying) }
    }

    /// Brings `x` down and starts `operation` on it; its result goes up to where `x` is.
    fn stage(&self, x: &Tensor, operation: impl FnOnce(&Tensor) -> Result<Pending>) -> Result<Pending> {
        let (route, device) = (Arc::clone(&self.route), x.device().clone());
        Ok(operation(&self.route.down(x)?)?.then(move |y| route.up(y, &device)))
    }
}

/// Copies a tensor to the host and waits for the copy: the driver may return before it has written pageable memory.
pub(crate) fn to_host(x: &Tensor) -> candle_core::Result<Tensor> {
    let here = x.to_device(&Device::Cpu)?;
    x.device().synchronize()?;
    Ok(here)
}

/// The way between a device and the host.
trait Route: Send + Sync {
    /// Returns a copy of `x` on the host.
    fn down(&self, x: &Tensor) -> Result<Tensor>;

    /// Returns a copy of `y`, which is on the host, on `device`.
    fn up(&self, y: Tensor, device: &Device) -> Result<Tensor>;
}

/// What candle does. What is on the host already stays there.
struct Copying;

impl Route for Copying {
    fn down(&self, x: &Tensor) -> Result<Tensor> {
        match x.device() {
            Device::Cpu => Ok(x.detach()),
            // Of a view, candle would copy the whole buffer that it looks into.
            _ => Ok(to_host(&x.detach().force_contiguous()?)?),
        }
    }

    fn up(&self, y: Tensor, device: &Device) -> Result<Tensor> {
        Ok(y.to_device(device)?)
    }
}

impl Collective for Staged {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn check_device(&self, _device: &Device) -> Result<()> {
        Ok(())
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_reduce(x, op))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_gather(x))
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        self.stage(x, |x| self.group.start_reduce_scatter(x))
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        self.stage(x, |x| self.group.start_all_to_all(x, send, recv))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.stage(x, |x| self.group.start_broadcast(x, root))
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        let (route, device) = (Arc::clone(&self.route), x.map_or(&self.device, Tensor::device).clone());
        let x = x.map(|x| self.route.down(x)).transpose()?;
        let received = self.group.start_send_recv(x.as_ref(), to, recv)?;
        Ok(received.then(move |y| y.map(|y| route.up(y, &device)).transpose()))
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let part = self.group.split(name, lists)?;
        if part.leaves_tensors_in_place() {
            return Ok(part);
        }
        Ok(Arc::new(Self { group: part, device: self.device.clone(), route: Arc::clone(&self.route) }))
    }
}

#[cfg(test)]
#[path = "../tests/cases/mod.rs"]
mod cases;

#[cfg(test)]
#[path = "../tests/cases/mapped.rs"]
mod mapped;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;
    use std::time::Duration;

    use candle_core::TensorId;

    use super::mapped::MappedGroup;
    use super::*;
    use crate::{Options, World, threads};

    /// The way to a device whose tensors are those of the CPU with their elements in the opposite order, so that one that
    /// was not sent up is found out. It knows those that it has brought down.
    #[derive(Default)]
    struct Mirror(Mutex<HashSet<TensorId>>);

    /// The elements in the opposite order, in a tensor of its own.
    fn mirrored(x: &Tensor) -> Result<Tensor> {
        let flat = x.detach().flatten_all()?;
        let flat = if flat.elem_count() > 1 { flat.flip(&[0])? } else { flat.copy()? };
        Ok(flat.reshape(x.shape())?)
    }

    impl Route for Mirror {
        fn down(&self, x: &Tensor) -> Result<Tensor> {
            let x = mirrored(x)?;
            self.0.lock().unwrap().insert(x.id());
            Ok(x)
        }

        fn up(&self, y: Tensor, _device: &Device) -> Result<Tensor> {
            mirrored(&y)
        }
    }

    /// Runs every case over tensors of the other device.
    fn check(world: &World) -> Result<u64> {
        let route = Arc::new(Mirror::default());
        let host = Arc::clone(&route);
        let only_staged = move |x: &Tensor| {
            assert!(host.0.lock().unwrap().contains(&x.id()), "a tensor of the device reached the group of the host");
            Ok(x.clone())
        };
        let group = Arc::new(MappedGroup::new(world.group(), only_staged, Ok));
        let staged = Arc::new(Staged { group, device: Device::Cpu, route });
        cases::check(&MappedGroup::new(staged, mirrored, |y| mirrored(&y)))
    }

    #[test]
    fn what_is_on_a_device_goes_through_the_host() {
        let options = Options { timeout: Duration::from_secs(60), record: false };
        for size in [1, 2, 3] {
            let plain = threads::run(size, options, |world| cases::check(&*world.group())).unwrap();
            assert_eq!(threads::run(size, options, check).unwrap(), plain);
        }
    }

    #[test]
    fn what_is_on_the_host_already_is_not_copied() {
        let staged = Staged::new(Arc::new(crate::Solo), &Device::Cpu);
        let x = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        assert_eq!(staged.all_reduce(&x, Reduce::Sum).unwrap().id(), x.id());
    }
}
