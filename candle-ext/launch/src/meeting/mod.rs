//! How the launchers of a job's nodes meet: at a store that one of them hosts, which the workers use too. With one node
//! the same happens with nobody else.
//!
//! Keys are `launch/JOB/ROUND/...`. `seats` says who takes part in a round, `watch` what the others are told while
//! workers run.

mod seats;
mod watch;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error, Server};

use crate::endpoint::{Endpoint, is_this_machine};
use crate::event::Event;
use crate::host::Host;
use crate::plan::{Plan, Rendezvous};
use crate::round::{Member, Round};
use crate::values::NodeRange;
use candlewick_comm::place::Master;

use watch::Questions;
pub use watch::Watch;

/// A node at the store.
#[derive(Debug)]
pub struct Meeting {
    /// Serves the other launchers, and the workers of the first round; kept until they have left.
    server: Option<Server>,
    store: Client,
    /// Where `server` is.
    address: Endpoint,
    is_only: bool,
    /// Serves the workers of the present round, if it is not the first.
    workers_server: Option<Server>,
    nodes: NodeRange,
    rendezvous: Rendezvous,
    monitor_interval: Duration,
    keep_alive: Duration,
    own: Member,
    /// What this node is in the present round.
    seat: Option<Seat>,
}

/// A place in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seat {
    round: usize,
    group_rank: usize,
    n_nodes: usize,
}

/// Why the nodes did not meet.
#[derive(Debug, thiserror::Error)]
pub enum MeetingError {
    /// The port of the store is taken.
    #[error(
        "host the store at {endpoint}: the port is in use, perhaps by another job \
         (--standalone takes a free one, --master-port or --rdzv-endpoint another)"
    )]
    PortInUse {
        /// Where.
        endpoint: Endpoint,
    },
    /// The store cannot be reached, or does not answer.
    #[error("meet at {endpoint}: {source}")]
    Store {
        /// Where.
        endpoint: Endpoint,
        /// What the store's client says.
        source: Box<Error>,
    },
    /// Two launchers say they are the same node.
    #[error("be node {node_rank}: another launcher of this job has that --node-rank, {other}")]
    NodeRankTaken {
        /// The number.
        node_rank: usize,
        /// The other's machine.
        other: String,
    },
    /// Nodes did not come.
    #[error("meet {min} nodes at {endpoint} within {timeout:?}: {missing}")]
    Missing {
        /// How many are needed.
        min: usize,
        /// Where.
        endpoint: Endpoint,
        /// How long was waited.
        timeout: Duration,
        /// Who is missing.
        missing: String,
    },
    /// A signal came while the nodes were waited for.
    #[error("meet the other nodes: stopped by signal {0}")]
    Interrupted(i32),
}

type Result<T> = std::result::Result<T, MeetingError>;

/// Looks for a signal that ends the wait.
pub type Interrupted<'a> = &'a dyn Fn() -> Option<i32>;

/// How long a wait lasts before a signal is looked for.
const SLICE: Duration = Duration::from_millis(50);

impl Meeting {
    /// Hosts the store, or connects to it.
    pub fn open(plan: &Plan, host: &Host, interrupted: Interrupted) -> Result<Self> {
        let (endpoint, timeout, is_host, is_certain) = match &plan.rendezvous {
            Rendezvous::Static { master, node_rank, timeout } => (master, *timeout, *node_rank == 0, true),
            Rendezvous::Dynamic(dynamic) => {
                let is_host = dynamic.is_host.unwrap_or_else(|| is_this_machine(&dynamic.endpoint.host, &host.name));
                (&dynamic.endpoint, dynamic.join, is_host, dynamic.is_host.is_some())
            }
        };
        let is_only = plan.nodes.max <= 1;
        let server = match is_host.then(|| bind(endpoint, is_only)).transpose() {
            // Two launchers of one machine find that both could host; one of them does.
            Err(MeetingError::PortInUse { .. }) if !is_certain && !is_only => None,
            server => server?,
        };
        let address = address_of(endpoint, server.as_ref(), is_only);
        let store = connect(&address, timeout, interrupted)?;
        let own = Member {
            host: plan.local_addr.clone().unwrap_or_else(|| host.name.clone()),
            n_workers: plan.local_world_size,
            role: plan.role.clone(),
        };
        Ok(Self {
            server,
            store: store.with_prefix(&format!("launch/{}", plan.run_id)),
            address,
            is_only,
            workers_server: None,
            nodes: plan.nodes,
            rendezvous: plan.rendezvous.clone(),
            monitor_interval: plan.monitor_interval,
            keep_alive: plan.keep_alive,
            own,
            seat: None,
        })
    }

    /// Waits until the nodes have agreed on who takes part in a round after `before`, and returns it with its number.
    pub fn next_round(&mut self, interrupted: Interrupted) -> Result<(usize, Round)> {
        let seat = match self.rendezvous.clone() {
            Rendezvous::Static { node_rank, timeout, .. } => self.take_given_seat(node_rank, timeout, interrupted)?,
            Rendezvous::Dynamic(dynamic) => self.take_free_seat(&dynamic, interrupted)?,
        };
        self.seat = Some(seat);
        let members = self.members(seat)?;
        let port = self.workers_port(seat)?;
        let master = Master { addr: self.address.host.clone(), port, agent_hosts_store: true };
        Ok((seat.round, Round { group_rank: seat.group_rank, members, master }))
    }

    /// The workers of a later round get a store of their own: what those before them left in theirs, addresses of
    /// processes that are dead, would lead them astray.
    fn serve_workers_of(&mut self, round: usize) -> Result<()> {
        if round == 0 || self.server.is_none() {
            return Ok(());
        }
        let server = bind(&Endpoint { host: self.address.host.clone(), port: 0 }, self.is_only)?;
        let seat = Seat { round, group_rank: 0, n_nodes: 0 };
        let port = server.port().to_string();
        self.workers_server = Some(server);
        self.store.set(&seat.key("port"), port.as_bytes()).map_err(|source| self.lost(source))
    }

    fn workers_port(&self, seat: Seat) -> Result<u16> {
        if seat.round == 0 {
            return Ok(self.address.port);
        }
        let port = self.store.get(&seat.key("port")).map_err(|source| self.lost(source))?;
        let port = String::from_utf8(port).ok().and_then(|port| port.parse().ok());
        Ok(port.expect("a launcher writes what a launcher reads"))
    }

    /// Tells the others that workers of this node failed. The first to say so is believed.
    pub fn tell_failure(&self, text: &str) {
        if let Some(seat) = self.seat {
            // Without a store the others notice by themselves.
            let _ = self.store.compare_set(&seat.key("failed"), b"", text.as_bytes());
        }
    }

    /// Looks after the other nodes while workers run; what happens there goes to `events`.
    pub fn watch(&self, events: Sender<Event>) -> Result<Option<Watch>> {
        let Some(seat) = self.seat.filter(|_| self.nodes.max > 1) else { return Ok(None) };
        let store = self.store.reconnect().map_err(|source| self.lost(source))?;
        Ok(Some(Watch::start(store, seat, self.questions(seat), events)))
    }

    /// Waits until every node's workers have ended well: they may need this node's store or ranks until then. Returns
    /// false if workers of another node failed meanwhile.
    pub fn wait_for_others(&self, interrupted: Interrupted) -> Result<bool> {
        let Some(seat) = self.seat else { return Ok(true) };
        let lost = |source| self.lost(source);
        self.store.add(&seat.key("done"), 1).map_err(lost)?;
        let deadline = Instant::now() + EXIT_BARRIER;
        while self.store.add(&seat.key("done"), 0).map_err(lost)? < seat.n_nodes as i64 {
            if self.store.check(&[&seat.key("failed")]).map_err(lost)? {
                return Ok(false);
            }
            if let Some(signal) = interrupted() {
                return Err(MeetingError::Interrupted(signal));
            }
            if Instant::now() > deadline {
                return Ok(true);
            }
            std::thread::sleep(SLICE);
        }
        Ok(true)
    }

    /// Goes for good. The host waits until the others have gone, so that they hear what there is to hear.
    pub fn leave(self) {
        let Some(seat) = self.seat else { return };
        let left = || self.store.add(&seat.key("left"), 0).is_ok_and(|left| left >= seat.n_nodes as i64);
        let _ = self.store.set(&seat.node_key("gone", seat.group_rank), b"1");
        let _ = self.store.add(&seat.key("left"), 1);
        let deadline = Instant::now() + FAREWELL;
        while self.server.is_some() && !left() && Instant::now() < deadline {
            std::thread::sleep(SLICE);
        }
    }

    fn questions(&self, seat: Seat) -> Questions {
        let may_grow = matches!(self.rendezvous, Rendezvous::Dynamic(_)) && seat.n_nodes < self.nodes.max;
        Questions { may_grow, interval: self.monitor_interval, keep_alive: self.keep_alive }
    }

    fn lost(&self, source: Error) -> MeetingError {
        MeetingError::Store { endpoint: self.address.clone(), source: Box::new(source) }
    }
}

/// How long a node whose workers are done waits for the others, as torchrun's does.
const EXIT_BARRIER: Duration = Duration::from_secs(300);
/// How long the host waits for the others to go.
const FAREWELL: Duration = Duration::from_secs(10);

impl Seat {
    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.round)
    }

    fn node_key(&self, name: &str, group_rank: usize) -> String {
        format!("{}/{name}/{group_rank}", self.round)
    }
}

/// A node that is alone and calls itself by a loopback address needs to be reached by nobody else.
fn bind(endpoint: &Endpoint, is_only: bool) -> Result<Server> {
    let server = match own_loopback(&endpoint.host).filter(|_| is_only) {
        Some(address) => Server::bind((address, endpoint.port)),
        None => Server::bind_any(endpoint.port),
    };
    server.map_err(|source| match &source {
        Error::Bind { source: reason, .. } if reason.kind() == std::io::ErrorKind::AddrInUse => {
            MeetingError::PortInUse { endpoint: endpoint.clone() }
        }
        _ => MeetingError::Store { endpoint: endpoint.clone(), source: Box::new(source) },
    })
}

/// Where the store is reached, by this node and by every worker.
fn address_of(endpoint: &Endpoint, server: Option<&Server>, is_only: bool) -> Endpoint {
    let loopback = own_loopback(&endpoint.host).filter(|_| is_only);
    let host = loopback.map_or_else(|| endpoint.host.clone(), |address| address.to_string());
    Endpoint { host, port: server.map_or(endpoint.port, Server::port) }
}

fn own_loopback(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => host.parse().ok().filter(IpAddr::is_loopback),
    }
}

fn connect(address: &Endpoint, timeout: Duration, interrupted: Interrupted) -> Result<Client> {
    let deadline = Instant::now() + timeout;
    let whole = timeout.max(Duration::from_secs(1));
    loop {
        match Client::connect(&address.host, address.port, SLICE) {
            Ok(_) => break,
            Err(Error::Connect { .. }) if Instant::now() < deadline => {}
            Err(source) => return Err(MeetingError::Store { endpoint: address.clone(), source: Box::new(source) }),
        }
        if let Some(signal) = interrupted() {
            return Err(MeetingError::Interrupted(signal));
        }
    }
    let client = Client::connect(&address.host, address.port, whole);
    client.map_err(|source| MeetingError::Store { endpoint: address.clone(), source: Box::new(source) })
}
