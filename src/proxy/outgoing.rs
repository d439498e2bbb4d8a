//! A request as it leaves: hop-by-hop out, the caller's credentials out, then the leased one in.

use http::header::SEC_WEBSOCKET_EXTENSIONS;
use http::request::Parts;
use http::{HeaderMap, Method, Request, Uri, Version};

use crate::config::{Compressed, Place, Provider, Scrub, catalogue, places};
use crate::fields::Rare;
use crate::forward::headers;
use crate::inject;
use crate::model::{Code, Fault};
use crate::route::Route;
use crate::route::apps::Apps;
use crate::route::ring::RingKey;
use crate::route::target::{Pair, host_header};
use crate::scrub;

/// What is the same in every sending of one request.
#[derive(Debug)]
pub(super) struct Outgoing {
    method: Method,
    headers: HeaderMap,
    websocket: bool,
}

impl Outgoing {
    /// Everything that must not leave is gone from it, but for what the key takes the place of.
    pub(super) fn new(head: Parts, route: &Route, apps: &Apps, compressed: Compressed) -> Self {
        let (mut fields, provider) = (head.headers, route.provider());
        let replaced = |name: &str| inject::is_replaced(name, provider);
        headers::strip_request(&mut fields, route.rare, head.version, route.host.clone(), |name| {
            inject::never_leaves(name, &provider.keep) && !replaced(name)
        });
        if route.rare.has(Rare::SUBPROTOCOL) {
            inject::strip_subprotocols(&mut fields, |member| is_credential(member, provider));
        }
        strip_tokens(&mut fields, apps, replaced);
        if compressed == Compressed::Decode && provider.scrub == Scrub::On {
            // What comes in a coding that cannot be taken off cannot be looked into either.
            scrub::keep_decodable(&mut fields);
            // What no side offers is not agreed on, so messages come as they are.
            fields.remove(SEC_WEBSOCKET_EXTENSIONS);
        }
        Self { method: head.method, headers: fields, websocket: route.websocket }
    }

    /// Whether it offers WebSocket extensions to the provider.
    pub(super) fn offers_extensions(&self) -> bool {
        self.websocket && self.headers.contains_key(SEC_WEBSOCKET_EXTENSIONS)
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) fn method(&self) -> &Method {
        &self.method
    }

    /// One sending, with this key. The headers themselves go, and a copy stays for another sending: hyper reads the
    /// answer into the map that the request was in, and a copy has no room for what an answer has more.
    pub(super) fn with_key(&mut self, route: &Route, key: Option<&RingKey>) -> Result<Request<()>, Fault> {
        let provider = route.provider();
        let key = key
            .ok_or_else(|| Fault::new(Code::KeyUnavailable, "the leased key is no longer configured here"))?;
        let is_credential = |raw: &str| {
            let pair = Pair { raw };
            // What is put in replaces what the caller sent of the same name.
            let all = places(&provider.inject).chain(places(&key.config.inject));
            if all.filter_map(Place::query).any(|name| pair.name_is(name)) {
                return true;
            }
            // `keep` names a query parameter as `?name`.
            let kept = |name: &str| provider.keep.iter().any(|kept| kept.strip_prefix('?') == Some(name));
            catalogue::credential_queries().iter().any(|name| pair.name_is(name) && !kept(name))
        };
        let copy = self.headers.clone();
        let mut fields = std::mem::replace(&mut self.headers, copy);
        if self.websocket {
            headers::put_websocket(&mut fields);
        }
        let key = (&*key.config, key.credential.as_deref());
        let target = inject::put(provider, key, route.path(), &route.target, &mut fields, is_credential)?;
        Ok(request(self.method.clone(), target, fields))
    }
}

/// A request for a host that is no provider's: as it is, less what is hop-by-hop or lessor's own.
pub(super) fn for_other_host(head: Parts, target: Uri, websocket: bool, apps: &Apps) -> Request<()> {
    let mut fields = head.headers;
    let rare = Rare::of(&fields);
    headers::strip_request(&mut fields, rare, head.version, host_header(&target), inject::is_own);
    strip_tokens(&mut fields, apps, |_| false);
    if websocket {
        headers::put_websocket(&mut fields);
    }
    request(head.method, target, fields)
}

/// An app's token is for lessor alone, also where a credential place is kept or is another host's; not so where
/// it is `replaced` anyway.
fn strip_tokens(fields: &mut HeaderMap, apps: &Apps, replaced: impl Fn(&str) -> bool) {
    if !apps.required() {
        return;
    }
    for name in catalogue::credential_headers().iter().filter(|name| !replaced(name.as_str())) {
        if fields.get_all(name).iter().any(|value| apps.is_token(value.as_bytes())) {
            fields.remove(name);
        }
    }
    inject::strip_subprotocols(fields, |member| {
        let member = member.trim_ascii();
        apps.is_token(catalogue::subprotocol_secret(member, &[]).unwrap_or(member))
    });
}

/// Whether a WebSocket subprotocol carries a credential, and is not to be left alone.
fn is_credential(member: &[u8], provider: &Provider) -> bool {
    let member = member.trim_ascii();
    let kept = |prefix: &String| {
        member.get(..prefix.len()).is_some_and(|head| head.eq_ignore_ascii_case(prefix.as_bytes()))
    };
    let credential = catalogue::subprotocol_secret(member, &provider.subprotocols).is_some();
    credential && !provider.keep.iter().any(kept)
}

/// Trailers as they leave: nothing that could not be a header of the request.
pub(super) fn strip_trailers(trailers: &mut HeaderMap, to: Option<&Provider>) {
    headers::strip_trailers(trailers, |name| {
        inject::never_leaves(name, &[]) || to.is_some_and(|to| inject::carries(&to.inject, name))
    });
}

fn request(method: Method, target: Uri, fields: HeaderMap) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = target;
    *request.version_mut() = Version::HTTP_11;
    *request.headers_mut() = fields;
    request
}
