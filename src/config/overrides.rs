//! What the command line of `lessor run` says over the configuration, each time that it is read: so a reload
//! keeps it.
//!
//! The file must be sound without it, so that `lessor check` of one file tells for all who run by it. What only
//! shows beside the file's values is looked at here, and a mistake names its option.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::errors::{ConfigError, Mistake};
use super::providers::own_listener;
use super::{Address, Config, catalogue, fields, values};
use crate::model::{PoolName, ProviderName};

/// What stands in front of mistakes.
const ORIGIN: &str = "the command line";

/// The options of `lessor run`, as they were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `--proxy`.
    pub proxy: Option<Address>,
    /// `--admin-ip`; the port stays.
    pub admin_ip: Option<IpAddr>,
    /// `--ca-dir`.
    pub ca_dir: Option<PathBuf>,
    /// `--default-pool`.
    pub default_pool: Option<PoolName>,
    /// `--upstreams`; empty: all.
    pub upstreams: Vec<ProviderName>,
    /// `--grace`.
    pub grace: Option<Duration>,
    /// `--linger`.
    pub linger: Option<Duration>,
    /// `--quit`.
    pub quit: bool,
}

impl Overrides {
    /// Reads the value of `--proxy`.
    ///
    /// # Errors
    /// What it must be.
    pub fn address(text: &str) -> Result<Address, String> {
        values::address(text)
    }

    /// Reads the value of `--admin-ip`: an IPv6 address may have brackets.
    ///
    /// # Errors
    /// What it must be.
    pub fn ip(text: &str) -> Result<IpAddr, String> {
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        let ip: IpAddr = bare.parse().map_err(|_| {
            "must be an IP address such as 10.1.2.3 or fd00::7; the port is that of listen.admin".to_owned()
        })?;
        // The system would bind it, and nobody could connect.
        if ip.to_canonical().is_multicast() || ip.to_canonical() == std::net::Ipv4Addr::BROADCAST {
            return Err(
                "must be an address of this machine, such as 10.1.2.3 or fd00::7, not one of many".into()
            );
        }
        Ok(ip)
    }

    /// Reads a duration, by the rule of the file.
    ///
    /// # Errors
    /// What it must be.
    pub fn duration(text: &str) -> Result<Duration, String> {
        let read = values::duration(text).ok_or(values::DURATION_FORM)?;
        let most = || format!("must be at most {}", values::spell(values::LONGEST));
        (read <= values::LONGEST).then_some(read).ok_or_else(most)
    }

    /// Reads one name of `--upstreams`.
    ///
    /// # Errors
    /// What it must be.
    pub fn upstream(text: &str) -> Result<ProviderName, String> {
        ProviderName::parse(text.trim()).map_err(|cause| cause.to_string())
    }

    /// Whether keys of this provider are lent.
    pub(super) fn serves(&self, provider: &ProviderName) -> bool {
        self.upstreams.is_empty() || self.upstreams.contains(provider)
    }

    /// Says it over `config`; every mistake at once.
    pub(super) fn apply(&self, config: &mut Config) -> Result<(), ConfigError> {
        let mut mistakes = Vec::new();
        self.listen(config, &mut mistakes);
        self.pool(config, &mut mistakes);
        self.only_upstreams(config, &mut mistakes);
        self.shutdown(config, &mut mistakes);
        config.ca_dir.clone_from(&self.ca_dir);
        if self.ca_dir.is_some() && !config.intercept {
            config.warnings.push("--ca-dir stays empty: with proxy.intercept = false there is no CA".into());
        }
        if mistakes.is_empty() {
            return Ok(());
        }
        let mistakes = mistakes.into_iter().map(|problem| Mistake::of(ORIGIN, problem)).collect();
        Err(ConfigError { mistakes, files: config.files.files() })
    }

    fn listen(&self, config: &mut Config, mistakes: &mut Vec<String>) {
        let listen = &mut config.listen;
        if let Some(proxy) = &self.proxy {
            let anybody = config.apps.iter().all(|app| app.token.is_none());
            if let Address::Tcp(at) = proxy
                && anybody
                && !values::is_loopback(at.ip())
            {
                mistakes.push(format!(
                    "--proxy is {at}, which other machines may reach: add [apps.NAME] with a token to the \
                     configuration, or listen on 127.0.0.1"
                ));
            }
            listen.proxy = vec![proxy.clone()];
        }
        if let (Some(ip), Address::Tcp(at)) = (self.admin_ip, &mut listen.admin) {
            at.set_ip(ip);
        }
        config.quit = self.quit;
        if self.proxy.is_none() && self.admin_ip.is_none() && !self.quit {
            return;
        }
        let listen = &config.listen;
        for admin in [Some(listen.admin.clone()), config.quit_door()].into_iter().flatten() {
            if let Some(other) = listen.proxy.iter().find(|other| values::collide(other, &admin)) {
                mistakes.push(format!(
                    "the admin listener would be {admin}, and the proxy listens on {other}: give --proxy or \
                     listen.admin another port"
                ));
            }
        }
        for provider in config.providers.values() {
            if let Some(own) = own_listener(provider, listen) {
                let (name, url) = (&provider.name, &provider.base_url);
                mistakes.push(format!(
                    "providers.{name}.base_url is {url}, which is lessor's own listener {own}, not a provider"
                ));
            }
        }
    }

    fn pool(&self, config: &mut Config, mistakes: &mut Vec<String>) {
        let Some(pool) = &self.default_pool else { return };
        let usual = PoolName::default_pool();
        let of_keys = config.keys.iter().map(|key| &key.pool);
        let mut known: Vec<&PoolName> = of_keys.chain(config.pools.keys()).chain([&usual]).collect();
        known.sort_unstable();
        known.dedup();
        if !known.contains(&pool) {
            let hint = fields::hint(pool.as_str(), known.iter().map(|pool| pool.as_str()));
            mistakes
                .push(format!("--default-pool is {pool}, must be a pool of some key or of [pools]; {hint}"));
        }
        config.default_pool = Some(pool.clone());
    }

    fn only_upstreams(&self, config: &mut Config, mistakes: &mut Vec<String>) {
        for name in &self.upstreams {
            let builtin = catalogue::builtin();
            if !builtin.contains_key(name) && !config.providers.contains_key(name) {
                let mut all: Vec<&str> =
                    builtin.keys().chain(config.providers.keys()).map(ProviderName::as_str).collect();
                all.sort_unstable();
                all.dedup();
                let hint = fields::hint(name.as_str(), all.iter().copied());
                mistakes.push(format!("--upstreams names {name}, which is no provider; {hint}"));
            } else if config.keys.iter().all(|key| key.provider != *name) {
                config.warnings.push(format!("--upstreams names {name}, which has no key here"));
            }
        }
        config.upstreams.clone_from(&self.upstreams);
        config.keys.retain(|key| self.serves(&key.provider));
        config.providers.retain(|name, _| self.serves(name));
    }

    fn shutdown(&self, config: &mut Config, mistakes: &mut Vec<String>) {
        let shutdown = &mut config.shutdown;
        shutdown.grace = self.grace.unwrap_or(shutdown.grace);
        shutdown.linger = self.linger.unwrap_or(shutdown.linger);
        if shutdown.linger > shutdown.grace {
            let (linger, grace) = (values::spell(shutdown.linger), values::spell(shutdown.grace));
            mistakes.push(match self.linger {
                Some(_) => format!("--linger is {linger}, must be at most shutdown.grace ({grace})"),
                None => format!("--grace is {grace}, must be at least shutdown.linger ({linger})"),
            });
        }
    }
}

impl Config {
    /// Where the admin API is listened for besides `listen.admin`, so that `POST /quit` is reached on loopback;
    /// `None` where it is anyway. With port 0 it is that of the other.
    pub fn quit_door(&self) -> Option<Address> {
        let Address::Tcp(admin) = &self.listen.admin else { return None };
        let loopback = std::net::Ipv4Addr::LOCALHOST;
        let reached = admin.ip().is_unspecified() || admin.ip().to_canonical() == loopback;
        (self.quit && !reached).then(|| Address::Tcp((loopback, admin.port()).into()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    const FILE: &str = "\
[listen]
admin = \"127.0.0.1:9000\"
[shutdown]
linger = \"2s\"
[providers.own]
base_url = \"https://llm.internal\"
[[keys]]
id = \"a\"
provider = \"openai\"
pool = \"vip\"
secret = { env = \"A\" }
[[keys]]
id = \"b\"
provider = \"own\"
secret = { env = \"B\" }
";

    fn read(overrides: &Overrides) -> Result<Config, String> {
        let env = |name: &str| Some(format!("secret-of-{name}-0123456789"));
        let mut config = crate::config::load_str(FILE, "lessor.toml", &env).unwrap();
        overrides.apply(&mut config).map_err(|error| error.to_string())?;
        Ok(config)
    }

    fn names(all: &[&str]) -> Vec<ProviderName> {
        all.iter().map(|name| ProviderName::parse(name).unwrap()).collect()
    }

    #[test]
    fn every_option_counts_in_place_of_the_files_value_and_none_changes_nothing() {
        let plain = read(&Overrides::default()).unwrap();
        assert_eq!((plain.shutdown.linger, plain.shutdown.grace), (secs(2), secs(30)));
        assert_eq!((plain.keys.len(), plain.listen.admin.to_string()), (2, "127.0.0.1:9000".into()));
        let config = read(&Overrides {
            proxy: Some(Overrides::address("127.0.0.1:9100").unwrap()),
            admin_ip: Some(Overrides::ip("fd00::7").unwrap()),
            ca_dir: Some("/run/ca".into()),
            default_pool: Some(PoolName::parse("vip").unwrap()),
            upstreams: names(&["openai", "anthropic"]),
            grace: Some(secs(25)),
            linger: Some(secs(1)),
            quit: true,
        })
        .unwrap();
        assert_eq!(config.listen.proxy[0].to_string(), "127.0.0.1:9100");
        assert_eq!(config.listen.admin.to_string(), "[fd00::7]:9000");
        assert_eq!(config.quit_door().unwrap().to_string(), "127.0.0.1:9000");
        assert_eq!((config.shutdown.grace, config.shutdown.linger), (secs(25), secs(1)));
        assert_eq!(config.default_pool.unwrap().as_str(), "vip");
        assert_eq!(config.keys.iter().map(|key| key.id.as_str()).collect::<Vec<_>>(), ["a"]);
        assert!(!config.providers.contains_key("own"));
        assert_eq!(config.warnings, ["--upstreams names anthropic, which has no key here"]);
    }

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    #[test]
    fn an_address_may_have_brackets_and_no_port() {
        assert_eq!(Overrides::ip("[fd00::7]"), Ok("fd00::7".parse().unwrap()));
        assert_eq!(Overrides::ip("10.1.2.3"), Ok("10.1.2.3".parse().unwrap()));
        for bad in ["", "localhost", "10.1.2.3:8322", "[10.1.2.3", "$(POD_IP)"] {
            assert!(Overrides::ip(bad).unwrap_err().contains("such as 10.1.2.3"), "{bad}");
        }
    }

    #[test]
    fn an_address_of_many_machines_is_refused() {
        for bad in ["224.0.0.1", "239.1.2.3", "[ff02::1]", "::ffff:224.0.0.1", "255.255.255.255"] {
            assert!(Overrides::ip(bad).unwrap_err().contains("must be an address of this machine"), "{bad}");
        }
    }

    #[test]
    fn mistakes_are_told_all_at_once_and_each_names_its_option() {
        let error = read(&Overrides {
            proxy: Some(Overrides::address("0.0.0.0:9000").unwrap()),
            default_pool: Some(PoolName::parse("vipp").unwrap()),
            upstreams: names(&["opnai"]),
            grace: Some(secs(1)),
            ..Overrides::default()
        })
        .unwrap_err();
        for part in [
            "the command line: --proxy is 0.0.0.0:9000, which other machines may reach",
            "the admin listener would be 127.0.0.1:9000, and the proxy listens on 0.0.0.0:9000",
            "--default-pool is vipp, must be a pool of some key or of [pools]; did you mean `vip`?",
            "--upstreams names opnai, which is no provider; did you mean `openai`?",
            "--grace is 1s, must be at least shutdown.linger (2s)",
        ] {
            assert!(error.contains(part), "no {part:?} in\n{error}");
        }
        let far = Overrides { upstreams: names(&["xyz"]), linger: Some(secs(31)), ..Overrides::default() };
        let error = read(&far).unwrap_err();
        assert!(error.contains("known are `anthropic`, "), "{error}");
        assert!(error.contains("--linger is 31s, must be at most shutdown.grace (30s)"), "{error}");
    }

    #[test]
    fn the_door_for_quit_is_not_made_where_loopback_is_listened_on_already() {
        let door = |ip: &str| {
            let overrides =
                Overrides { admin_ip: Some(ip.parse().unwrap()), quit: true, ..Overrides::default() };
            read(&overrides).unwrap().quit_door().map(|door| door.to_string())
        };
        assert_eq!((door("127.0.0.1"), door("0.0.0.0"), door("::")), (None, None, None));
        assert_eq!(door("10.1.2.3").as_deref(), Some("127.0.0.1:9000"));
        assert_eq!(door("::1").as_deref(), Some("127.0.0.1:9000"));
    }
}
