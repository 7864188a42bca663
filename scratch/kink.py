import sys, time, math, torch
from torch import nn
from torch.nn import functional as F
torch.set_num_threads(1)
from experiments.harness.images import image_set
from experiments.peers import network_of, SPEC

class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, w):
        ctx.save_for_backward(z); ctx.w = w
        return (z > 0).to(z.dtype)
    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        w = ctx.w * z.detach().pow(2).mean().sqrt()
        return g * torch.exp(-0.5*(z/w)**2)/(w*math.sqrt(2*math.pi)), None

class Kink(nn.Module):
    width = 0.3
    def forward(self, z):
        if Kink.width is None: return F.relu(z)
        s = Step.apply(z, Kink.width)
        # value relu; first derivative: want exactly step in backward of value -> use trick
        return KR.apply(z)

class KR(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z); return z.clamp_min(0)
    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g * Step.apply(z, Kink.width)

def swap(m):
    for n, c in m.named_children():
        if isinstance(c, nn.ReLU): setattr(m, n, Kink())
        else: swap(c)
N=59

def tv(x): return (x[...,1:,:]-x[...,:-1,:]).abs().mean()+(x[...,:,1:]-x[...,:,:-1]).abs().mean()

def run(net, target, label, iters, lr, tvw, width, shape, seed=0, truth=None, anneal=False, start=None, weights=None, signed=True, log=0):
    torch.manual_seed(seed)
    x = (0.5+0.25*torch.randn(shape)).clamp(0,1) if start is None else start.clone()
    x.requires_grad_()
    opt = torch.optim.Adam([x], lr=lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [int(iters*a) for a in (3/8,5/8,7/8)], gamma=0.1 if not anneal else 0.3)
    ps = list(net.parameters())
    best, bx = 9e9, None
    for i in range(iters):
        Kink.width = width if not anneal or width is None else width * (0.05 ** (i/iters))
        loss = F.cross_entropy(net(x), label)
        g = torch.autograd.grad(loss, ps, create_graph=True)
        if weights is None:
            dot = sum((a*b).sum() for a,b in zip(g,target)); na = sum(a.square().sum() for a in g).sqrt(); nb = sum(b.square().sum() for b in target).sqrt()
            m = 1 - dot/(na*nb)
        else:
            m = sum(w*(1-F.cosine_similarity(a.flatten(), b.flatten(), dim=0)) for a,b,w in zip(g,target,weights))/sum(weights)
        tot = m + tvw*tv(x)
        (gx,) = torch.autograd.grad(tot, [x])
        if float(tot) < best: best, bx, bm = float(tot), x.detach().clone(), float(m)
        x.grad = gx.sign() if signed else gx
        opt.step(); sched.step()
        with torch.no_grad(): x.clamp_(0,1)
        if log and i % log == 0: print(i, float(m), -10*math.log10(float((x-truth).square().mean())), flush=True)
    Kink.width=None
    return bx, bm

if __name__ == "__main__":
    mode, trained, count = sys.argv[1], sys.argv[2]=="trained", int(sys.argv[3])
    iters = int(sys.argv[4])
    data = sys.argv[5]
    variants = eval(sys.argv[6])
    imgs = image_set(data, count, "choose")
    for v in variants:
        ps, ms = [], []
        t=time.process_time()
        for c in range(count):
            net, acc = network_of("resnet20","relu",trained,1000+c)
            import copy; net=copy.deepcopy(net); swap(net); net.train(mode=="train")
            x = imgs.images[c:c+1].expand(-1,3,-1,-1).contiguous(); y = imgs.labels[c:c+1]
            Kink.width=None
            if mode=="train":
                for m in net.modules():
                    if isinstance(m, nn.BatchNorm2d): m.track_running_stats=False
            tg = [g.detach() for g in torch.autograd.grad(F.cross_entropy(net(x),y), list(net.parameters()))]
            r, m = run(net, tg, y, iters, truth=x, shape=x.shape, **v)
            ps.append(-10*math.log10(float((r-x).square().mean()))); ms.append(m)
            corr = float(torch.corrcoef(torch.stack([r.flatten(),x.flatten()]))[0,1])
            print("   ", c, round(ps[-1],2), round(m,4), "corr", round(corr,3), flush=True)
        print(mode, trained, v, "psnr %.2f match %.4f cpu %.0f"%(sum(ps)/count, sum(ms)/count, (time.process_time()-t)/count), flush=True)
