"""Preconditioners whose factors are computed from the averaged gradient by their owners."""

from mpikfac.preconditioners.gradient.kl_shampoo import KLShampoo as KLShampoo
from mpikfac.preconditioners.gradient.muon import Muon as Muon
from mpikfac.preconditioners.gradient.normuon import NorMuon as NorMuon
from mpikfac.preconditioners.gradient.shampoo import Shampoo as Shampoo
from mpikfac.preconditioners.gradient.soap import SOAP as SOAP
