//! CONNECT: a blind tunnel, or one that is opened here; and the requests inside of an opened one.

use std::net::IpAddr;
use std::sync::Arc;

use http::request::Parts;
use http::uri::Authority;
use http::{Method, Uri};

use super::target::{connect_target, host_key, refuse_dot_segments};
use super::{
    Caller, From, Head, Plan, Routes, forward_target, host_of, refuse_bad_port, refuse_foreign_port,
    refuse_method_and_upgrade,
};
use crate::config::Provider;
use crate::model::{Code, Fault, Inside, Mode, Site};

impl Routes {
    /// Judges a CONNECT. All that can wait for a request is left to the inside, where SDKs read errors.
    pub(super) fn connect(&self, head: &Parts, from: From, caller: &mut Caller) -> Result<Plan, Fault> {
        let app = self.apps.identify(Mode::Connect, from, &head.headers, None, false)?;
        self.admit(app, caller)?;
        let (host, port) = connect_target(&head.uri)?;
        // Node's fetch sends that where an app has both a base URL and a proxy.
        if self.own_ports.contains(&port) && self.is_own_name(&host, from) {
            let (names, app) = (Vec::new(), app.name.clone());
            return Ok(Plan::Open(Arc::new(Site { host, port, names, app, is_own: true })));
        }
        let Some(keys) = self.provider_of(&host)? else {
            self.refuse_other_host(&host)?;
            return Ok(Plan::Tunnel { host, port, app: app.name.clone() });
        };
        if !self.config.intercept {
            return Err(Fault::new(
                Code::DestinationDenied,
                format!(
                    "CONNECT to {host} would hide the request from lessor, and proxy.intercept is false; \
                     use a base URL (http://SIDECAR/PROVIDER) or an http:// target through the proxy"
                ),
            ));
        }
        // Node's fetch asks for an `http://` target so, too.
        if port != 80 {
            refuse_foreign_port(&keys.provider, &host, port)?;
        }
        let names = names_beside(&keys.provider, &host);
        Ok(Plan::Open(Arc::new(Site { host, port, names, app: app.name.clone(), is_own: false })))
    }

    /// Judges a request inside a tunnel that was opened here.
    pub(super) fn inside(
        &self,
        asked: Head<'_>,
        inside: &Inside,
        caller: &mut Caller,
    ) -> Result<Plan, Fault> {
        let head = asked.parts;
        let denied = |why| Fault::new(Code::AppForbidden, why);
        let app = self
            .apps
            .by_name(&inside.site.app)
            .ok_or_else(|| denied(format!("app `{}` is no longer known here", inside.site.app)))?;
        self.admit(app, caller)?;
        if head.method == Method::CONNECT {
            return Err(Fault::new(Code::MethodDenied, "this is the inside of a CONNECT already"));
        }
        refuse_method_and_upgrade(asked)?;
        refuse_misdirected(head, inside)?;
        if inside.site.is_own {
            self.refuse_foreign_page(asked, host_of(head)?)?;
            return self.by_path(asked, app);
        }
        let path = head.uri.path();
        if !path.starts_with('/') {
            return Err(Fault::new(Code::BadRequest, "the request target has no path"));
        }
        refuse_dot_segments(path)?;
        let Some(keys) = self.provider_of(&inside.host)? else {
            let why = format!("{} is no longer a host of a provider that is served", inside.host);
            return Err(Fault::new(Code::DestinationDenied, why));
        };
        let to = forward_target(&keys, &inside.host, path, head.uri.query())?;
        self.lend(asked, keys, Mode::Connect, to, path, app)
    }
}

/// The names that TLS may ask for where CONNECT named an address: those of the same provider.
fn names_beside(provider: &Provider, host: &str) -> Vec<String> {
    if host.parse::<IpAddr>().is_err() {
        return Vec::new();
    }
    let names = provider.hosts.iter().map(|name| host_key(name));
    names.filter(|name| name.parse::<IpAddr>().is_err()).collect()
}

/// Refuses what does not name, in each of its places, the very host and port of the tunnel: a key must not
/// go where another name leads.
fn refuse_misdirected(head: &Parts, inside: &Inside) -> Result<(), Fault> {
    let misdirected = |what: &str| {
        let why = format!(
            "{what} another host or port than this CONNECT to {}:{}",
            inside.site.host, inside.site.port
        );
        Err(Fault::new(Code::Misdirected, why))
    };
    if inside.foreign_name.is_some() {
        return misdirected("the TLS server name is");
    }
    let host: Option<Authority> = host_of(head)?.parse().ok();
    if !host.is_some_and(|host| names(&host, inside, inside.tls)) {
        return misdirected("Host names");
    }
    match head.uri.authority() {
        Some(target) if !names(target, inside, is_https(&head.uri)) => misdirected("the target names"),
        _ => Ok(()),
    }
}

fn is_https(target: &Uri) -> bool {
    target.scheme_str() == Some("https")
}

/// Whether `authority` names the inside's host and port; without one it is the usual port that is meant.
fn names(authority: &Authority, inside: &Inside, https: bool) -> bool {
    let usual = if https { 443 } else { 80 };
    !authority.as_str().contains('@')
        && refuse_bad_port(authority).is_ok()
        && host_key(authority.host()) == inside.host
        && authority.port_u16().unwrap_or(usual) == inside.site.port
}
